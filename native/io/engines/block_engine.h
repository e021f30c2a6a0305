// What every engine does alike: splitting operations into blocks, bounding the blocks in flight,
// checking completions, retrying, settling. An engine differs only in how its threads take blocks,
// transfer them and stop, and in what it registers with the kernel.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "io/fault_plan.h"
#include "io/io_engine.h"
#include "io/io_operation.h"

namespace hetero {

class BlockEngine : public IoEngine {
 public:
  std::vector<std::string> notes() const override;
  int add_file(const std::vector<FileMember>& members, const StripeMap& stripes) override;
  void remove_file(int file) override;
  std::shared_ptr<IoOp> submit(IoKind kind, int file, void* address, std::size_t nbytes,
                               std::uint64_t offset, IoTurn turn = IoTurn::next) override;
  void cancel(IoOp& op) override;
  void abandon(IoOp& op) noexcept override;
  IoStats stats() const override;
  void inject(const Fault& fault) override;
  void close() override;

  // False in a forked child, where destroying the engine would touch what is not ours to touch. Its
  // memory is then leaked on purpose.
  bool disposable() const { return !foreign(); }

 protected:
  explicit BlockEngine(const IoOptions& options);

  // The engine's half.
  //
  // `waiting` blocks may be taken by the engine's threads. Called with mutex_ held.
  virtual void wake(std::size_t waiting) = 0;
  // Called once, when nothing is in flight: joins the threads and gives back kernel objects.
  virtual void stop() = 0;

  // The block that has waited longest to be transferred, or null. Needs mutex_.
  Block* take();
  // The result of one transfer: bytes or -errno. Needs mutex_; call pump() after a batch of them.
  // Throws nothing: a thread of the engine has nobody to throw to, so the operation fails instead.
  void complete(Block& block, std::int64_t result) noexcept;
  // Whether some of what completed made no progress and is to be tried again after a pause.
  bool resting() const { return resting_ != nullptr; }  // needs mutex_
  // That pause, one for all of them, with the mutex dropped so that other transfers go on. Call it
  // after a batch of complete(), then take().
  void rest(std::unique_lock<std::mutex>& lock);
  // Refills the queue from the backlog, and has somebody take the blocks. Needs mutex_.
  void pump();
  // Fails everything in flight, queued and still to come; for an engine that lost its kernel
  // object. Needs mutex_.
  void lose(int error);
  bool lost() const { return lost_error_ != 0; }  // needs mutex_
  // Until every operation submitted before this call is settled.
  void wait_for_earlier(std::unique_lock<std::mutex>& lock);
  // Throws in a forked child, where mutex_ may be held by a thread that does not exist.
  void require_own() const;
  void require_open() const;  // needs mutex_
  void note(std::string text);
  Block& block(std::size_t slot) { return blocks_[slot]; }

  const IoOptions options_;
  mutable std::mutex mutex_;

 private:
  enum class Phase { open, closing, closed };
  using Backlog = std::deque<std::shared_ptr<Operation>>;

  bool foreign() const;
  void refill();
  bool launch_next();
  Backlog* backlog();
  bool retry(Block& block);
  void restart(Block& block);
  void judge(Block& block, std::int64_t result);
  void continue_short(Block& block, std::size_t got);
  void fail(Block& block, int error, std::size_t got_bytes);
  void release(Block& block);
  void settle_if_finished(Operation& op);

  const pid_t owner_;
  Phase phase_ = Phase::open;
  std::condition_variable changed_;  // an operation settled, or the phase changed
  std::map<int, std::shared_ptr<IoFile>> files_;
  int next_file_ = 0;
  std::vector<Block> blocks_;
  std::vector<Block*> free_blocks_;
  // Launched blocks that no thread has taken yet, oldest first, linked by `next`.
  Block* first_ = nullptr;
  Block* last_ = nullptr;
  std::size_t waiting_ = 0;
  Block* resting_ = nullptr;  // stalled blocks, between complete() and rest() of the same thread
  int lost_error_ = 0;
  // Operations with bytes not yet in flight, those of IoTurn::next and those of IoTurn::idle.
  Backlog next_, idle_;
  std::set<std::uint64_t> unsettled_;  // serial numbers of operations
  std::uint64_t next_serial_ = 0;
  FaultPlan faults_;
  IoStats stats_;
  std::vector<std::string> notes_;
};

}  // namespace hetero
