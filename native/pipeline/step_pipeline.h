// The optimizer step over tiles: read -> update -> write, several tiles in flight.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/fork.h"
#include "base/thread_annotations.h"
#include "base/worker_pool.h"
#include "io/io_engine.h"
#include "pipeline/buffer_policy.h"
#include "pipeline/buffer_pool.h"
#include "pipeline/step_task.h"
#include "pipeline/work_queue.h"
#include "update/update.h"

namespace hetero {

struct StepStats {
  std::uint64_t tasks = 0;  // updated
  std::uint64_t hits = 0;   // tasks that found their file parts in a buffer that kept them
  std::uint64_t ahead = 0;  // tasks that found them read ahead
  std::uint64_t read_bytes = 0, written_bytes = 0;
  double busy_s = 0;     // while some update was unfinished
  double compute_s = 0;  // while some update was being computed
};

// Works on two threads: the stager gives buffers to the tasks in order and submits their reads, as
// far ahead as there are buffers; the updater posts a task to the worker pool when it has been
// read, and computes with the pool's workers. As many tasks are under way as give each of the
// pool's threads two blocks, so that no thread waits for the end of a small tile. Tasks end in
// their order, whichever is computed first, and tasks of one tile one after the other: so traffic
// does not depend on timing. The thread that computes a task's last block submits the writes.
//
// A parameter is written at once, because the next forward reads it from the file; an optimizer
// state only when its buffer is needed for another one (buffer_policy.h), or by flush(). Until then
// the file is behind, so a key's optimizer state must not move before forget().
//
// No caller has to wait for what is read ahead, or to end it: what buffers keep is what the file
// has, whether its task comes or not. All transfers take their turns after those of others
// (IoTurn::idle): a backward that reads parameters meanwhile does not wait for more than is in
// flight.
//
// The first failure, of a transfer or anything else, stops the pipeline: queued tasks are dropped
// and every later call but close() and stats() rethrows it.
//
// After fork() the child's copy refuses all work (std::runtime_error) and close() does nothing.
//
// offload/_native.pyi says what the calls do; those of a key are here of that one, or of all.
class StepPipeline {
 public:
  static constexpr std::int64_t kAnyKey = -1;

  // The arena holds the buffers until close(). Throws std::invalid_argument for what does not fit
  // together. To be made by make_own().
  StepPipeline(std::shared_ptr<IoEngine> engine, int file, const Arena* arena, std::size_t buffers,
               const TileLayout& layout);
  ~StepPipeline() { close(); }
  StepPipeline(const StepPipeline&) = delete;
  StepPipeline& operator=(const StepPipeline&) = delete;

  bool foreign() const { return guard_.foreign(); }

  // All or nothing. RAM parts of the tasks must stay until they are updated.
  void submit(std::vector<StepTask> tasks, std::span<const Hyper> hypers,
              const std::optional<UpdateKind>& other = std::nullopt) EXCLUDES(mutex_);
  void expect(std::vector<Expectation> expected, std::size_t streaming) EXCLUDES(mutex_);
  bool take_back(std::int64_t first, std::size_t count) EXCLUDES(mutex_);
  bool keeps(std::int64_t key) const EXCLUDES(mutex_);
  void wait_updated(std::int64_t key = kAnyKey) EXCLUDES(mutex_);
  bool is_updated(std::int64_t key = kAnyKey) const EXCLUDES(mutex_);
  void wait_written(std::int64_t key = kAnyKey) EXCLUDES(mutex_);
  bool is_written(std::int64_t key = kAnyKey) const EXCLUDES(mutex_);
  void flush(std::int64_t key = kAnyKey) EXCLUDES(mutex_);
  void forget(std::int64_t key = kAnyKey) EXCLUDES(mutex_);
  StepStats stats() const EXCLUDES(mutex_);
  void give_up(const std::string& why) EXCLUDES(mutex_);
  // No update after that one is begun.
  void inject(std::uint64_t nth) EXCLUDES(mutex_);
  void hold(std::uint64_t nth) EXCLUDES(mutex_);
  void release() EXCLUDES(mutex_);
  // If tasks were abandoned, later waits throw.
  void close() EXCLUDES(closing_mutex_, mutex_);

 private:
  using Clock = std::chrono::steady_clock;

  // A task that the updater has taken. Its job is posted once its transfers are done.
  struct Update {
    Work work;
    std::shared_ptr<Job> job = nullptr;
    bool computed = false;  // or failed with `error`
    std::exception_ptr error = nullptr;
  };

  void thread_main(void (StepPipeline::*loop)()) EXCLUDES(mutex_);

  // The stager.
  void stage_tasks() EXCLUDES(mutex_);
  void stage_first() REQUIRES(mutex_);
  bool read_ahead() REQUIRES(mutex_);
  Buffer* acquire(const StepTask& task, QueuePlace place) REQUIRES(mutex_);
  Buffer* take_another(std::int64_t key, QueuePlace place) REQUIRES(mutex_);
  bool settle(Buffer& buffer) REQUIRES(mutex_);

  // The updater.
  void update_tasks() EXCLUDES(mutex_);
  bool can_begin() const REQUIRES(mutex_);
  void begin_update() REQUIRES(mutex_);
  bool wait_for_transfers(Buffer* buffer) REQUIRES(mutex_);
  void post(Update& update, bool fails) REQUIRES(mutex_);
  std::vector<UpdateSlice> slices_of(const Work& work) const;
  void compute_or_wait() REQUIRES(mutex_);

  // Any thread that computes.
  void note_checksums(const Work& work) const EXCLUDES(mutex_);
  void end_update(Update& update, std::exception_ptr error) EXCLUDES(mutex_);
  void end_first_update() REQUIRES(mutex_);
  void submit_writes(const Work& work, Buffer& buffer) REQUIRES(mutex_);

  bool stopping() const REQUIRES(mutex_) { return closing_ || failure_ != nullptr; }
  bool is_first(QueuePlace place) const REQUIRES(mutex_) {
    return !stopping() && !queued_.empty() && queued_.front().place == place;
  }
  bool is_unfinished(std::int64_t key) const REQUIRES(mutex_);
  void note_unfinished() REQUIRES(mutex_);  // after each change of unfinished_
  void note_computing() REQUIRES(mutex_);   // before each change of posted_
  void wait_until_updated(std::int64_t key) REQUIRES(mutex_);
  // If somebody waits for updates, the transfers of the last task that was begun take their turn
  // before what only somebody is going to wait for: the updater may have nothing else to do.
  void hurry_last_begun() REQUIRES(mutex_);
  void throw_if_closed() const REQUIRES(mutex_);
  void throw_if_failed() const REQUIRES(mutex_);
  void fail(std::exception_ptr error) REQUIRES(mutex_);
  void settle_all() REQUIRES(mutex_);
  Operations writes_of(std::int64_t key) const REQUIRES(mutex_);
  // Starts a transfer of part of the buffer.
  std::shared_ptr<IoOp> transfer(IoKind kind, const Buffer& buffer, std::size_t at,
                                 std::size_t nbytes, std::int64_t offset) const;
  void submit_write(Buffer& buffer, std::size_t at, std::size_t nbytes, std::int64_t offset)
      REQUIRES(mutex_);
  void submit_state_write(Buffer& buffer) REQUIRES(mutex_);
  void write_back(Buffer& buffer) REQUIRES(mutex_);
  // Whether every assigned buffer is the held front's, a staged task's or that of a task under way,
  // and of one of them alone; for HETERO_CHECK.
  bool is_consistent() const REQUIRES(mutex_);

  const ForkGuard guard_{"step pipeline", "make another one after fork()"};
  const TileLayout layout_;
  const std::shared_ptr<IoEngine> engine_;
  const int file_;
  const bool has_checksums_;  // the file has

  mutable Mutex mutex_;
  Condition changed_;  // any of what follows
  BufferPool buffers_ GUARDED_BY(mutex_);
  WorkQueue queued_ GUARDED_BY(mutex_);  // tasks without a buffer
  BufferPolicy policy_ GUARDED_BY(mutex_);
  std::deque<Work> staged_ GUARDED_BY(mutex_);  // reads submitted
  std::size_t staged_with_buffers_ GUARDED_BY(mutex_) = 0;
  std::list<Update> under_way_ GUARDED_BY(mutex_);  // in the order of their tasks
  std::size_t posted_ GUARDED_BY(mutex_) = 0;       // of them: all, or all but the last
  std::size_t waiting_ GUARDED_BY(mutex_) = 0;      // callers, for updates
  // By key, the tasks in queued_, staged_ and under_way_.
  std::unordered_map<std::int64_t, std::size_t> unfinished_ GUARDED_BY(mutex_);
  std::optional<Clock::time_point> busy_since_ GUARDED_BY(mutex_);
  Clock::time_point computing_noted_ GUARDED_BY(mutex_);
  StepStats stats_ GUARDED_BY(mutex_);
  std::optional<std::uint64_t> updates_until_fault_ GUARDED_BY(mutex_);
  std::optional<std::uint64_t> updates_until_hold_ GUARDED_BY(mutex_);  // 0: that update is held
  bool closing_ GUARDED_BY(mutex_) = false;
  std::exception_ptr failure_ GUARDED_BY(mutex_);         // the first
  std::shared_ptr<const void> pages_ GUARDED_BY(mutex_);  // of the buffers

  Mutex closing_mutex_;  // held by the one caller that closes
  std::thread stager_ GUARDED_BY(closing_mutex_);
  std::thread updater_ GUARDED_BY(closing_mutex_);
};

}  // namespace hetero
