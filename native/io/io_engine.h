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
class IoEngine {
 public:
  // `kind`: "io_uring" or "threads". Throws std::system_error when io_uring was not built (ENOSYS)
  // or the kernel refuses it, std::invalid_argument for an unknown kind or an option out of range.
  // To be made by make_own().
  IoEngine(std::string kind, const IoOptions& options);
  ~IoEngine() { close(); }
  bool foreign() const { return fork_.foreign(); }
  const std::string& kind() const { return kind_; }
  std::vector<std::string> notes() const;
  // One logical file of several members, or of one. Throws std::invalid_argument unless `stripes`
  // is for as many. With `checksums` what is read is compared with what was written, by whoever
  // waits for the read first; transfers are whole pages then.
  int add_file(const std::vector<FileMember>& members, const StripeMap& stripes,
               bool checksums = false);
  // Errors of transfers that begin in the range say what it has. It replaces one that began there.
  void name_range(int file, std::uint64_t offset, std::uint64_t nbytes, std::string name);
  // The checksums of pages of a file that has them: 0 of those that were never written.
  PageChecksums::Checksums checksums(int file, std::uint64_t offset, std::size_t nbytes) const;
  void set_checksums(int file, std::uint64_t offset, const PageChecksums::Checksums& checksums);
  // Memory for the checksums of a file of `nbytes`, so that no transfer has to get any.
  void reserve_checksums(int file, std::uint64_t nbytes);
  // Returns when all that is written is durable. Throws std::system_error that names the member.
  void sync(int file);
  // Waits for the file's operations, then closes the duplicates.
  void remove_file(int file);
  // Keeps the arena's memory and pages until unregister_memory() or close(); a child that is forked
  // from now on reads zeros there. False, with a note, when the kernel refuses; false without a
  // note when this engine has nothing to register with.
  bool register_memory(const Arena& arena);
  void unregister_memory(const Arena& arena);
  // The memory must be in an arena, which keeps it, and counts the transfer, until the operation is
  // done. `checksums` are those of the pages that are written, if the caller has them and the file
  // has checksums: to compute them here takes long. Throws std::invalid_argument otherwise and for
  // a bad file id, std::runtime_error after close().
  std::shared_ptr<IoOp> submit(IoKind kind, int file, void* address, std::size_t nbytes,
                               std::uint64_t offset, IoTurn turn = IoTurn::next,
                               PageChecksums::Checksums checksums = {});
  bool has_checksums(int file) const EXCLUDES(shared_.mutex);
  // Somebody waits for `op` now: what is not in flight takes its turn as of IoTurn::next. `op` is
  // this engine's.
  void hurry(IoOp& op);
  // Drops the blocks of `op` that are not in flight; wait() throws an IoError of ECANCELED as soon
  // as those in flight are done. Nothing if it is done or was cancelled. `op` is this engine's.
  void cancel(IoOp& op);
  IoStats stats() const;
  void inject(const Fault& fault);
  // Cancels what is not in flight and waits for the rest.
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
