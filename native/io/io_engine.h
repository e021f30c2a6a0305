// The I/O engine's interface: asynchronous transfers between memory and files.
//
// A caller submits an operation and keeps its handle; the engine splits the operation into blocks,
// keeps up to `queue_depth` blocks of all operations in flight, checks every completion, resubmits
// short transfers, retries EAGAIN and EINTR for a second, and settles the handle exactly once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "io/stripe_map.h"
#include "memory/arena.h"

namespace hetero {

enum class IoKind { read, write };

// When an operation's blocks take their turn: in the order of submission, those that can wait after
// all others. A block that is in flight is not overtaken.
enum class IoTurn { next, idle };

// A failed transfer, with all that a message needs. One that cancel() or close() cut off has
// ECANCELED, and its numbers are those of the whole operation: where it begins in the logical file,
// its size, and how many of its bytes were transferred (not always the first ones).
struct IoError : std::runtime_error {
  IoError(IoKind kind, std::string path, std::uint64_t offset, std::size_t wanted_bytes,
          std::size_t got_bytes, int error, std::int64_t free_bytes);
  IoKind kind;
  std::string path;
  std::uint64_t offset;      // into the member file, where the failing block began
  std::size_t wanted_bytes;  // of the block that failed
  std::size_t got_bytes;
  int error;                // errno; 0 for an unexpected end of file
  std::int64_t free_bytes;  // of the filesystem; -1 if unknown
};

// The handle of one operation. Shared by the submitter and the engine.
class IoOp {
 public:
  virtual ~IoOp() = default;
  virtual bool done() const = 0;
  virtual void wait() = 0;  // blocks; throws IoError if the operation failed
};

// A file to be added: the engine duplicates `fd` and uses `path` in messages only.
struct FileMember {
  int fd;
  std::string path;
};

// For tests: the `nth` completion of `kind` (from 0, counted from now) and the `count` - 1 after it
// become -`error`, or are cut to `short_bytes`, or throw in the engine's own thread.
struct Fault {
  IoKind kind;
  std::uint64_t nth = 0;
  int error = 0;
  std::int64_t short_bytes = -1;
  std::uint64_t count = 1;
  bool throws = false;
};

// Counters since the engine was made.
struct IoStats {
  std::uint64_t read_bytes = 0, written_bytes = 0;
  std::uint64_t reads = 0, writes = 0;  // blocks completed
  std::uint64_t short_transfers = 0, retries = 0, errors = 0;
  std::uint64_t in_flight = 0;  // blocks, now
  double busy_s = 0;            // for which at least one block was in flight
};

// Asynchronous file transfers; all members may be called from any thread. After fork() an engine
// belongs to the parent alone: in the child every use throws and close() does nothing.
class IoEngine {
 public:
  virtual ~IoEngine() = default;
  virtual std::string kind() const = 0;
  virtual std::vector<std::string> notes() const = 0;
  // One logical file of several members, or of one. Throws std::invalid_argument unless `stripes`
  // is for as many.
  virtual int add_file(const std::vector<FileMember>& members, const StripeMap& stripes) = 0;
  // Waits for the file's operations, then closes the duplicates.
  virtual void remove_file(int file) = 0;
  // Keeps the arena's memory and pages until unregister_memory() or close(); a child that is forked
  // from now on reads zeros there. False, with a note, when the kernel refuses; false without a
  // note when this engine has nothing to register with.
  virtual bool register_memory(const Arena& arena) = 0;
  virtual void unregister_memory(const Arena& arena) = 0;
  // The memory must be in an arena, which keeps it, and counts the transfer, until the operation is
  // done. Throws std::invalid_argument otherwise and for a bad file id, std::runtime_error after
  // close().
  virtual std::shared_ptr<IoOp> submit(IoKind kind, int file, void* address, std::size_t nbytes,
                                       std::uint64_t offset, IoTurn turn = IoTurn::next) = 0;
  // Drops the blocks of `op` that are not in flight; wait() throws an IoError of ECANCELED as soon
  // as those in flight are done. Nothing if it is done or was cancelled. `op` is this engine's.
  virtual void cancel(IoOp& op) = 0;
  // cancel(), and waits until the operation is done, however it ends. Nothing in a forked child.
  virtual void abandon(IoOp& op) noexcept = 0;
  virtual IoStats stats() const = 0;
  virtual void inject(const Fault& fault) = 0;
  // Cancels what is not in flight and waits for the rest.
  virtual void close() = 0;
};

struct IoOptions {
  unsigned queue_depth = 32;
  std::size_t block_bytes = std::size_t{1} << 20;
  unsigned threads = 4;
};

// "io_uring" or "threads". Throws std::system_error when io_uring was not built (ENOSYS) or the
// kernel refuses it, std::invalid_argument for an unknown kind or an option out of range.
std::shared_ptr<IoEngine> make_io_engine(const std::string& kind, const IoOptions& options);

}  // namespace hetero
