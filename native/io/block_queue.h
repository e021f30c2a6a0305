// What every engine does alike: operations split into blocks, the blocks in flight bounded, their
// completions checked, retried and settled. A state machine without threads or locks: its
// owner has a mutex for it, and transfers what it take()s.
//
// The queue of blocks in flight is refilled at each completion, from all operations, so that it
// does not run empty between one chunk's transfer and the next.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "base/thread_annotations.h"
#include "io/io_operation.h"

namespace hetero {

struct IoOptions {
  unsigned queue_depth = 32;
  std::size_t block_bytes = std::size_t{1} << 20;
  unsigned threads = 4;
  // Seconds for which a block is tried again that fails for want of resources, or moves nothing:
  // longer than a controller's reset or a failover to another path takes.
  double patience_s = 30;
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

inline constexpr std::chrono::milliseconds kStallPause{1};

class BlockQueue {
 public:
  // `settled` is notified whenever an operation is. Throws std::invalid_argument for an option out
  // of range.
  BlockQueue(const IoOptions& options, Condition& settled);

  // Throws std::bad_alloc, and has then forgotten the operation.
  std::shared_ptr<IoOp> submit(IoKind kind, std::shared_ptr<IoFile> file, std::byte* address,
                               std::size_t nbytes, std::uint64_t offset, Span memory, IoTurn turn);
  // Somebody waits for `op` now: its blocks that are not in flight become those of IoTurn::next.
  // Nothing if there are none, or if they are that already.
  void hurry(IoOp& op);
  // Drops the blocks that are not in flight. Nothing if `op` is done.
  void cancel(IoOp& op);
  // The same of all operations that are not in flight as a whole; each counts as an error.
  void cancel_backlog();

  // How many blocks may be taken now.
  std::size_t waiting();
  // The block that has waited longest, or null. The caller transfers it and tells complete().
  Block* take();
  // The result of a transfer: bytes or -errno. Throws nothing, because a thread of an engine has
  // nobody to throw to: the operation fails instead.
  void complete(Block& block, std::int64_t result) noexcept;
  // Takes the blocks that complete() found to make no progress, or null. The caller gives them back
  // after a pause of kStallPause.
  Block* begin_pause() { return std::exchange(resting_, nullptr); }
  void end_pause(Block* resting);

  // The engine lost its kernel object: all that is not being transferred fails, now and from now
  // on.
  void lose(int error);
  bool lost() const { return lost_error_ != 0; }
  // Nothing will ever be heard of what is being transferred: it fails, and its memory, to which the
  // kernel may still write, is never given back.
  void abandon(int error);

  Block& block(std::size_t index) { return blocks_[index]; }
  std::size_t transferring() const { return transferring_; }
  // Serial numbers of operations grow; whether all before `end` are settled.
  std::uint64_t next_serial() const { return next_serial_; }
  bool settled_before(std::uint64_t end) const {
    return unsettled_.empty() || *unsettled_.begin() >= end;
  }
  // Whether an operation before `end` that is not settled uses any of these bytes.
  bool uses(const std::byte* memory, std::size_t nbytes, std::uint64_t end) const;
  IoStats stats() const;
  // Throws std::invalid_argument for a fault that does nothing.
  void inject(const Fault& fault);
  // Aborts if an invariant does not hold; see base/check.h.
  void check() const;

 private:
  double busy_seconds() const;  // since busy_since_
  using Backlog = std::deque<std::shared_ptr<IoOp>>;

  void launch_all();
  bool launch_next();
  Backlog* backlog();
  bool retry(Block& block);
  void enqueue(Block& block);
  std::int64_t with_faults(IoKind kind, std::int64_t result);
  void judge(Block& block, std::int64_t result);
  void continue_short(Block& block, std::size_t got);
  void fail(Block& block, int error, std::size_t got_bytes);
  void release(Block& block);
  void settle_if_finished(IoOp& op);

  const std::size_t block_bytes_;
  const std::chrono::steady_clock::duration patience_;
  Condition& settled_;
  std::vector<Block> blocks_;
  std::vector<Block*> free_;
  // Blocks to be taken, oldest first, linked by `next`.
  Block* first_ = nullptr;
  Block* last_ = nullptr;
  std::size_t queued_ = 0;
  Block* resting_ = nullptr;
  std::size_t transferring_ = 0;
  int lost_error_ = 0;
  Backlog& backlog_of(IoTurn turn) { return backlogs_[static_cast<std::size_t>(turn)]; }

  // Operations with bytes not yet in flight, by IoTurn.
  std::array<Backlog, kIoTurns> backlogs_;
  std::set<std::uint64_t> unsettled_;  // serial numbers
  std::uint64_t next_serial_ = 0;
  std::vector<Fault> faults_;  // `nth` and `count` count down
  IoStats stats_;
  std::chrono::steady_clock::time_point busy_since_;  // when blocks began to be in flight
};

}  // namespace hetero
