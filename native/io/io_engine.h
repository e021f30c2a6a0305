// The I/O engine: asynchronous transfers between memory and files.
//
// A caller submits an operation and keeps its handle; the engine splits the operation into blocks,
// keeps up to `queue_depth` blocks of all operations in flight, checks every completion, resubmits
// short transfers, retries what may pass (EAGAIN, ENOMEM) for `patience_s`, and settles the handle
// exactly once.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/fork.h"
#include "io/engines/driver.h"

namespace hetero {

// Asynchronous file transfers; all members may be called from any thread. After fork() an engine
// belongs to the parent alone: in the child every use throws and close() does nothing.
// offload/_native.pyi says what the calls do.
class IoEngine {
 public:
  // Throws std::system_error when io_uring was not built (ENOSYS) or the kernel refuses it. To be
  // made by make_own().
  IoEngine(std::string kind, const IoOptions& options);
  ~IoEngine() { close(); }
  bool foreign() const { return fork_.foreign(); }
  const std::string& kind() const { return kind_; }
  std::vector<std::string> notes() const;
  // Throws std::invalid_argument unless `stripes` is for as many members. With `checksums` whoever
  // waits for a read first compares.
  int add_file(const std::vector<FileMember>& members, const StripeMap& stripes,
               bool checksums = false);
  // It replaces one that began there.
  void name_range(int file, std::uint64_t offset, std::uint64_t nbytes, std::string name);
  PageChecksums::Checksums checksums(int file, std::uint64_t offset, std::size_t nbytes) const;
  void set_checksums(int file, std::uint64_t offset, const PageChecksums::Checksums& checksums);
  void reserve_checksums(int file, std::uint64_t nbytes);
  void sync(int file);
  void remove_file(int file);
  bool register_memory(const Arena& arena);
  void unregister_memory(const Arena& arena);
  // The arena keeps the memory, and counts the transfer, until the operation is done. `checksums`
  // are those of the pages that are written, if the caller has them and the file has checksums: to
  // compute them here takes long.
  std::shared_ptr<IoOp> submit(IoKind kind, int file, void* address, std::size_t nbytes,
                               std::uint64_t offset, IoTurn turn = IoTurn::next,
                               PageChecksums::Checksums checksums = {});
  bool has_checksums(int file) const EXCLUDES(shared_.mutex);
  void hurry(IoOp& op);  // of this engine, as the next
  void cancel(IoOp& op);
  IoStats stats() const;
  void inject(const Fault& fault);
  void close();

 private:
  enum class Phase { open, closing, closed };

  void require_open() const REQUIRES(shared_.mutex);
  const std::shared_ptr<IoFile>& file_of(int id) const REQUIRES(shared_.mutex);
  PageChecksums& checksums_of(int id) const REQUIRES(shared_.mutex);

  const ForkGuard fork_{"I/O engine", "make a new engine here"};
  const std::string kind_;
  mutable SharedQueue shared_;
  Phase phase_ GUARDED_BY(shared_.mutex) = Phase::open;
  Condition closed_;
  std::map<int, std::shared_ptr<IoFile>> files_ GUARDED_BY(shared_.mutex);
  int next_file_ GUARDED_BY(shared_.mutex) = 0;
  std::atomic<bool> any_checksums_ = false;  // of any file
  const std::unique_ptr<Driver> driver_;     // last: its threads use the others
};

}  // namespace hetero
