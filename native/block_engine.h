// What every engine does alike: splitting operations into blocks, bounding the blocks in flight,
// checking completions, retrying, settling. An engine differs only in how it puts a block in
// flight (start, flush), in what it registers with the kernel, and in how its threads stop.
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

#include "block.h"
#include "fault_plan.h"
#include "io_engine.h"

namespace hetero {

class BlockEngine : public IoEngine {
 public:
  std::vector<std::string> notes() const override;
  int add_file(const std::vector<FileMember>& members, const StripeMap& stripes) override;
  void remove_file(int file) override;
  std::shared_ptr<IoOp> submit(IoKind kind, int file, void* address, std::size_t nbytes,
                               std::uint64_t offset) override;
  void cancel(IoOp& op) override;
  IoStats stats() const override;
  void inject(const Fault& fault) override;
  void close() override;

  // False when destroying the engine would touch what is not ours to touch: in a forked child, or
  // when its thread could not be stopped. Its memory is then leaked on purpose.
  bool disposable() const { return !foreign() && !abandoned_; }

 protected:
  struct Refused {
    Block* block;
    int error;
  };

  explicit BlockEngine(const IoOptions& options);

  // The engine's half. All of these but stop() are called with mutex_ held.
  //
  // Prepares the rest of a block; an errno when that is impossible.
  virtual int start(Block& block) = 0;
  // Puts what was prepared in flight; returns what could not be, which is then not in flight.
  virtual std::vector<Refused> flush() = 0;
  // Called once, when nothing is in flight: joins the threads and gives back kernel objects.
  virtual void stop() = 0;
  // The file's slot in a table of the kernel's, or -1.
  virtual int attach_file(int) { return -1; }
  virtual void detach_file(int) {}

  // The result of one transfer: bytes or -errno. Needs mutex_; call pump() after a batch of them.
  // Throws nothing: a thread of the engine has nobody to throw to, so the operation fails instead.
  void complete(Block& block, std::int64_t result) noexcept;
  // Gives up a block that was never begun, because its operation was abandoned. Needs mutex_.
  void drop(Block& block) { release(block); }
  // Refills the queue from the backlog. Needs mutex_.
  void pump();
  // Fails everything in flight and queued; for an engine that lost its kernel object. Needs mutex_.
  void fail_in_flight(int error);
  // Until every operation submitted before this call is settled.
  void wait_for_earlier(std::unique_lock<std::mutex>& lock);
  // Throws in a forked child, where mutex_ may be held by a thread that does not exist.
  void require_own() const;
  void require_open() const;  // needs mutex_
  void note(std::string text);
  Block& block(std::size_t slot) { return blocks_[slot]; }

  const IoOptions options_;
  mutable std::mutex mutex_;
  bool abandoned_ = false;

 private:
  enum class Phase { open, closing, closed };

  bool foreign() const;
  bool launch_next();
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
  std::deque<std::shared_ptr<Operation>> backlog_;  // operations with bytes not yet in flight
  std::set<std::uint64_t> unsettled_;               // serial numbers of operations
  std::uint64_t next_serial_ = 0;
  FaultPlan faults_;
  IoStats stats_;
  std::vector<std::string> notes_;
};

}  // namespace hetero
