#include "pipeline/step_pipeline.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "base/quiet_thread.h"
#include "base/worker_pool.h"
#include "pipeline/step_buffers.h"

namespace hetero {
namespace {

constexpr std::int64_t kAnyKey = -1;

using OpPtr = std::shared_ptr<IoOp>;

// Adds the time a scope takes to a figure; built and destroyed under the lock that guards it.
class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds) {}
  ~Stopwatch() {
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Throws where an update computes: on whichever of the pool's threads gets there first.
void fail_in_pool(std::int64_t key) {
  WorkerPool::instance().run(WorkerPool::instance().threads(), [key](std::size_t) {
    throw std::runtime_error("the update of piece " + std::to_string(key) + " was made to fail");
  });
}

}  // namespace

class StepPipeline::Impl {
 public:
  Impl(std::shared_ptr<IoEngine> engine, int file, char* memory, std::size_t buffers,
       const PieceLayout& layout, std::shared_ptr<const void> keeper)
      : layout_(layout),
        engine_(std::move(engine)),
        file_(file),
        keeper_(std::move(keeper)),
        buffers_(memory, buffers, layout_.buffer_bytes()),
        most_staged_(std::max<std::size_t>(1, buffers / 2)) {
    stager_ = quiet_thread("hetero-stage", [this] { thread_main(&Impl::stage_tasks); });
    try {
      updater_ = quiet_thread("hetero-step", [this] { thread_main(&Impl::update_tasks); });
    } catch (...) {
      close();
      throw;
    }
  }

  void submit(std::vector<StepTask> tasks, std::span<const Hyper> hypers);
  void expect(std::vector<Expectation> expected, std::size_t streaming);
  void wait_updated(std::int64_t key);
  bool is_updated(std::int64_t key) const;
  bool is_written(std::int64_t key);
  void wait_written(std::int64_t key);
  void flush(std::int64_t key);
  void forget(std::int64_t key);
  StepStats stats() const;
  void inject(std::uint64_t nth);
  void hold(std::uint64_t nth);
  void release();
  void close();

 private:
  using Lock = std::unique_lock<std::mutex>;

  void thread_main(void (Impl::*loop)());

  // The stager.
  void stage_tasks();
  bool reads_ahead_first();
  bool read_ahead(Lock& lock);
  Buffer* acquire(Lock& lock, const StepTask& task, Turn turn);
  Buffer* take_another(Lock& lock, std::int64_t key, Turn turn);
  bool settle(Lock& lock, Buffer& buffer);
  void submit_reads(const StepTask& task, Buffer& buffer, bool read_record, bool read_param);

  // The updater.
  void update_tasks();
  void update(const Work& work) const;
  void submit_writes(const StepTask& task, Buffer& buffer);

  // With the lock held.
  bool stopping() const { return closing_ || failure_ != nullptr; }
  bool is_first(Turn turn) const {
    return !stopping() && !queued_.empty() && queued_.front().turn == turn;
  }
  bool unfinished(std::int64_t key) const;
  std::size_t staged_with_buffers() const;
  bool write_at_once(std::int64_t key) const;
  void settle_all();
  OpPtr transfer(IoKind kind, Buffer& buffer, std::size_t at, std::size_t nbytes,
                 std::int64_t offset) const;
  void submit_write(Buffer& buffer, std::size_t at, std::size_t nbytes, std::int64_t offset);
  void submit_record_write(Buffer& buffer);
  void launder(Buffer& buffer);
  void fail(std::exception_ptr error);
  void throw_if_failed() const;

  std::vector<OpPtr> writes_of(std::int64_t key);

  const PieceLayout layout_;
  const std::shared_ptr<IoEngine> engine_;
  const int file_;

  std::shared_ptr<const void> keeper_;  // of the buffers' memory

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // any of what follows
  BufferPool buffers_;
  // Of tasks with buffers: half of those that are not kept. With all of them the disk, whose queue
  // is first in first out, would read all, then write all, and never both at once, which is faster.
  std::size_t most_staged_;
  std::size_t streaming_ = 0;    // buffers that keep nothing, if the order repeats
  WorkQueue queued_;             // no buffer yet
  std::deque<Work> staged_;      // reads submitted
  std::optional<Work> current_;  // the updater's; changed by it alone
  StepStats stats_;
  std::optional<std::uint64_t> updates_until_fault_;
  std::optional<std::uint64_t> updates_until_hold_;  // 0: the update at hand is held
  bool closing_ = false;
  std::exception_ptr failure_;  // the first

  std::mutex closing_turn_;
  std::thread stager_;
  std::thread updater_;
};

// --- submitting and waiting -----------------------------------------------------------------

void StepPipeline::Impl::submit(std::vector<StepTask> tasks, std::span<const Hyper> hypers) {
  for (const StepTask& task : tasks) task.check(layout_, hypers.size(), engine_ != nullptr);
  auto constants = std::make_shared<std::vector<UpdateConstants>>();
  for (const Hyper& hyper : hypers) {
    hyper.validate();
    constants->push_back(make_constants(layout_.kind, hyper));
  }
  const Lock lock(mutex_);
  settle_all();
  if (closing_) throw std::runtime_error("the step pipeline is closed");
  for (StepTask& task : tasks) queued_.push({std::move(task), constants});
  changed_.notify_all();
}

void StepPipeline::Impl::expect(std::vector<Expectation> expected, std::size_t streaming) {
  for (const Expectation& each : expected) each.check(layout_, engine_ != nullptr);
  std::erase_if(expected, [](const Expectation& each) { return !each.in_file(); });
  const Lock lock(mutex_);
  settle_all();
  if (closing_) throw std::runtime_error("the step pipeline is closed");
  const std::size_t buffers = buffers_.size();
  streaming = std::min(streaming, buffers);
  most_staged_ = std::max<std::size_t>(1, (streaming == 0 ? buffers : streaming) / 2);
  if (streaming == 0) {
    queued_.expect(std::move(expected));
  } else {
    const std::size_t lacking = expected.size() - std::min(expected.size(), buffers);
    streaming_ = std::min(streaming, lacking);
    queued_.expect_again(std::move(expected), buffers - streaming_);
  }
  changed_.notify_all();
}

void StepPipeline::Impl::wait_updated(std::int64_t key) {
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return failure_ != nullptr || !unfinished(key); });
  settle_all();
}

bool StepPipeline::Impl::is_updated(std::int64_t key) const {
  const Lock lock(mutex_);
  return failure_ != nullptr || !unfinished(key);
}

bool StepPipeline::Impl::is_written(std::int64_t key) {
  const Lock lock(mutex_);
  if (failure_ != nullptr) return true;
  const std::vector<OpPtr> writes = writes_of(key);
  return !unfinished(key) && std::all_of(writes.begin(), writes.end(),
                                         [](const OpPtr& write) { return write->done(); });
}

void StepPipeline::Impl::wait_written(std::int64_t key) {
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return failure_ != nullptr || !unfinished(key); });
  throw_if_failed();
  // A buffer that has been reused since was written before: the stager waits for that.
  const std::vector<OpPtr> writes = writes_of(key);
  lock.unlock();
  std::exception_ptr error;
  for (const OpPtr& write : writes) {
    try {
      write->wait();
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  lock.lock();
  if (error) fail(error);
  settle_all();
}

void StepPipeline::Impl::flush(std::int64_t key) {
  {
    Lock lock(mutex_);
    changed_.wait(lock, [&] { return failure_ != nullptr || !unfinished(key); });
    throw_if_failed();
    if (closing_) throw std::runtime_error("the step pipeline is closed");
    for (Buffer& buffer : buffers_) {
      if (key != kAnyKey && buffer.key != key) continue;
      // (A task submitted since may have it.)
      if (buffer.state != BufferState::assigned && buffer.dirty()) launder(buffer);
    }
  }
  wait_written(key);
}

void StepPipeline::Impl::forget(std::int64_t key) {
  {
    const Lock lock(mutex_);
    queued_.forget_expected(key);
  }
  flush(key);
  Lock lock(mutex_);
  for (Buffer& buffer : buffers_) {
    const auto matches = [&] { return key == kAnyKey || buffer.key == key; };
    while (matches() && buffer.state == BufferState::reading) settle(lock, buffer);
    if (!matches()) continue;
    if (buffer.state != BufferState::idle || buffer.dirty()) continue;  // a task submitted since
    buffers_.forget(buffer);
  }
}

StepStats StepPipeline::Impl::stats() const {
  const Lock lock(mutex_);
  return stats_;
}

void StepPipeline::Impl::inject(std::uint64_t nth) {
  const Lock lock(mutex_);
  updates_until_fault_ = nth;
}

void StepPipeline::Impl::hold(std::uint64_t nth) {
  const Lock lock(mutex_);
  updates_until_hold_ = nth;
}

void StepPipeline::Impl::release() {
  const Lock lock(mutex_);
  updates_until_hold_.reset();
  changed_.notify_all();
}

void StepPipeline::Impl::close() {
  const std::lock_guard turn(closing_turn_);
  {
    const Lock lock(mutex_);
    closing_ = true;
    changed_.notify_all();
  }
  if (stager_.joinable()) stager_.join();
  if (updater_.joinable()) updater_.join();
  // The engine may still be using the buffers' memory. (Waiters may clear the lists meanwhile.)
  std::vector<OpPtr> reads, writes;
  {
    const Lock lock(mutex_);
    for (const Buffer& buffer : buffers_) {
      reads.insert(reads.end(), buffer.reads.begin(), buffer.reads.end());
      writes.insert(writes.end(), buffer.writes.begin(), buffer.writes.end());
    }
  }
  std::exception_ptr error;
  for (const OpPtr& read : reads) {
    engine_->cancel(*read);
    try {
      read->wait();
    } catch (...) {
      // Nobody wants the bytes any more.
    }
  }
  for (const OpPtr& write : writes) {
    try {
      write->wait();
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  const Lock lock(mutex_);
  if (error) fail(error);
  const std::size_t abandoned = queued_.size() + staged_.size() + (current_ ? 1 : 0);
  if (abandoned > 0) {
    fail(std::make_exception_ptr(std::runtime_error("the step pipeline was closed before " +
                                                    std::to_string(abandoned) +
                                                    " submitted updates were made")));
  }
  keeper_.reset();
  changed_.notify_all();
}

// --- with the lock held ---------------------------------------------------------------------

bool StepPipeline::Impl::unfinished(std::int64_t key) const {
  const auto matches = [&](const Work& work) { return key == kAnyKey || work.task.key == key; };
  return (current_ && matches(*current_)) || std::any_of(staged_.begin(), staged_.end(), matches) ||
         std::any_of(queued_.begin(), queued_.end(), matches);
}

std::size_t StepPipeline::Impl::staged_with_buffers() const {
  return static_cast<std::size_t>(std::count_if(
      staged_.begin(), staged_.end(), [](const Work& work) { return work.buffer != nullptr; }));
}

// Notices the writes that are done, so that a failed one is not overlooked. Throws the failure.
void StepPipeline::Impl::settle_all() {
  try {
    for (Buffer& buffer : buffers_) buffer.settle();
  } catch (...) {
    fail(std::current_exception());
  }
  throw_if_failed();
}

// Starts a transfer of part of the buffer. (This one needs no lock.)
OpPtr StepPipeline::Impl::transfer(IoKind kind, Buffer& buffer, std::size_t at, std::size_t nbytes,
                                   std::int64_t offset) const {
  return engine_->submit(kind, file_, buffer.memory + at, nbytes,
                         static_cast<std::uint64_t>(offset), IoTurn::idle);
}

// Starts a write. The buffer stays whose it is until the caller changes its state.
void StepPipeline::Impl::submit_write(Buffer& buffer, std::size_t at, std::size_t nbytes,
                                      std::int64_t offset) {
  buffer.writes.push_back(transfer(IoKind::write, buffer, at, nbytes, offset));
  stats_.written_bytes += nbytes;
}

void StepPipeline::Impl::submit_record_write(Buffer& buffer) {
  submit_write(buffer, 0, layout_.record_bytes(), buffer.dirty_at);
  buffer.dirty_at = Buffer::kClean;
}

// Starts the write that an idle buffer's record still lacks. A failure stops the pipeline.
void StepPipeline::Impl::launder(Buffer& buffer) {
  try {
    submit_record_write(buffer);
  } catch (...) {
    fail(std::current_exception());
    throw;
  }
  buffer.state = BufferState::writing;
}

void StepPipeline::Impl::fail(std::exception_ptr error) {
  if (failure_ == nullptr) failure_ = std::move(error);
  queued_.clear();
  staged_.clear();
  changed_.notify_all();
}

void StepPipeline::Impl::throw_if_failed() const {
  if (failure_ != nullptr) std::rethrow_exception(failure_);
}

std::vector<OpPtr> StepPipeline::Impl::writes_of(std::int64_t key) {
  std::vector<OpPtr> writes;
  for (const Buffer& buffer : buffers_) {
    if (key != kAnyKey && buffer.key != key) continue;
    writes.insert(writes.end(), buffer.writes.begin(), buffer.writes.end());
  }
  return writes;
}

// --- the threads ----------------------------------------------------------------------------

void StepPipeline::Impl::thread_main(void (Impl::*loop)()) {
  try {
    (this->*loop)();
  } catch (...) {
    const Lock lock(mutex_);
    fail(std::current_exception());
  }
}

void StepPipeline::Impl::stage_tasks() {
  Lock lock(mutex_);
  for (;;) {
    while (!stopping() && (queued_.empty() || reads_ahead_first())) {
      if (read_ahead(lock)) continue;
      if (!queued_.empty()) break;
      changed_.wait(lock);
    }
    if (stopping()) return;
    if (queued_.front().task.needs_buffer() && staged_with_buffers() >= most_staged_) {
      changed_.wait(lock);  // another task may be the first then
      continue;
    }
    const StepTask task = queued_.front().task;
    if (task.needs_buffer()) {
      Buffer* const buffer = acquire(lock, task, queued_.front().turn);
      if (stopping()) return;
      if (buffer == nullptr) continue;
      // It stays in the queue until it is staged: it is one of those that waiters wait for.
      queued_.hold_front();
      const bool read_record = task.record.in_file() && !buffer->keeps_record;
      const bool read_param = task.param.in_file() && !buffer->keeps_param;
      const bool cacheable = task.record.in_file() || task.param.in_file();
      if (cacheable && !read_record && !read_param) {
        ++(buffer->read_ahead ? stats_.ahead : stats_.hits);
      }
      buffer->read_ahead = false;
      if (read_record) stats_.read_bytes += layout_.record_bytes();
      if (read_param) stats_.read_bytes += layout_.param_bytes();
      if (task.grad.in_file()) stats_.read_bytes += layout_.grad_bytes();
      lock.unlock();
      submit_reads(task, *buffer, read_record, read_param);
      lock.lock();
      if (stopping()) return;
      queued_.front().buffer = buffer;
    }
    staged_.push_back(queued_.pop());
    changed_.notify_all();
  }
}

// Whether what comes next is read before what is queued. That is so at the end of an order that
// repeats, for what will be taken before all that is queued: somebody waits for just that, while
// the disk has plenty of time for the rest. Some buffers stay for what is queued.
bool StepPipeline::Impl::reads_ahead_first() {
  if (!queued_.repeats() || queued_.expected() > buffers_.size() + streaming_) return false;
  const Expectation* const next = buffers_.first_missing(queued_);
  return next != nullptr && next->due < queued_.front().task.due &&
         buffers_.read_ahead() + 2 < streaming_;
}

// Takes one step of reading ahead; false if there is none to take before something changes.
bool StepPipeline::Impl::read_ahead(Lock& lock) {
  const Expectation* const next = buffers_.first_missing(queued_);
  if (next == nullptr) return false;
  Buffer* buffer = buffers_.spare(queued_);
  if (buffer == nullptr) buffer = buffers_.given_up(queued_, queued_.next_use(next->key));
  if (buffer == nullptr && queued_.repeats()) {
    const std::vector<Buffer*> dirty = buffers_.launderable(queued_);
    if (!dirty.empty()) buffer = dirty.front();
  }
  if (buffer == nullptr) return false;
  if (buffer->dirty()) launder(*buffer);
  if (!settle(lock, *buffer)) return true;
  buffers_.rename(*buffer, next->key);
  // (Under the lock, so that close() sees every read that was started.)
  buffer->state = BufferState::reading;
  buffer->read_ahead = true;
  buffer->keeps_record = next->record.in_file();
  buffer->keeps_param = next->param.in_file();
  buffer->reads.clear();
  if (buffer->keeps_record) {
    buffer->reads.push_back(
        transfer(IoKind::read, *buffer, 0, layout_.record_bytes(), next->record.file_offset));
    stats_.read_bytes += layout_.record_bytes();
  }
  if (buffer->keeps_param) {
    buffer->reads.push_back(transfer(IoKind::read, *buffer, layout_.param_at(),
                                     layout_.param_bytes(), next->param.file_offset));
    stats_.read_bytes += layout_.param_bytes();
  }
  return true;
}

// Whether the buffer is idle. If not, waits without the lock until its transfers are done: all may
// have changed then. Reads ahead are cut off, nobody wants them.
bool StepPipeline::Impl::settle(Lock& lock, Buffer& buffer) {
  if (buffer.settle()) return true;
  const std::vector<OpPtr> writes = buffer.writes;
  std::vector<OpPtr> reads;
  if (buffer.state == BufferState::reading) {
    reads = buffer.reads;
    buffer.drop();
  }
  lock.unlock();
  for (const OpPtr& read : reads) {
    engine_->cancel(*read);
    try {
      read->wait();
    } catch (...) {
      // Nobody wants the bytes.
    }
  }
  for (const OpPtr& write : writes) write->wait();
  lock.lock();
  return false;
}

// The buffer that keeps the content of the first task's key, or one to give up; nullptr when
// stopping, or when a task came meanwhile that goes first.
Buffer* StepPipeline::Impl::acquire(Lock& lock, const StepTask& task, Turn turn) {
  Buffer* kept = nullptr;
  for (;;) {
    // While an earlier task with the same key has the buffer, the file is behind.
    changed_.wait(lock, [&] {
      kept = buffers_.find(task.key);
      return !is_first(turn) || kept == nullptr || kept->state != BufferState::assigned;
    });
    if (!is_first(turn)) return nullptr;
    if (kept == nullptr) return take_another(lock, task.key, turn);
    if (kept->state != BufferState::reading || kept->read_ahead) break;
    settle(lock, *kept);  // its reads were cut off, for forget()
  }
  if (kept->dirty() && kept->dirty_at != task.record.file_offset) {
    throw std::logic_error("StepTask " + std::to_string(task.key) +
                           ": its record was moved while a buffer keeps what belongs to offset " +
                           std::to_string(kept->dirty_at) + "; call forget() before moving it");
  }
  // (The updater waits for the writes of a kept buffer, and for what is still being read ahead;
  // reads of other parts may start now.)
  if (kept->state != BufferState::reading) kept->reads.clear();
  kept->state = BufferState::assigned;
  return kept;
}

// A buffer for the content of `key`, which none has; nullptr likewise. Of the buffers that no
// queued task wants the one used least recently, even if it is still being written, for the reason
// given at shortage(). To wait for a task's buffer is better than to give up content that another
// task is about to want; only if all is wanted, what is wanted last goes.
Buffer* StepPipeline::Impl::take_another(Lock& lock, std::int64_t key, Turn turn) {
  while (is_first(turn)) {
    Buffer* buffer = buffers_.spare(queued_);
    if (buffer == nullptr) buffer = buffers_.given_up(queued_, turn);
    if (buffer == nullptr) {
      // Dirty content is left of tasks that this step has none of. All that will be needed is
      // written together: one after the other the disk would wait for us each time.
      const std::vector<Buffer*> dirty = buffers_.launderable(queued_);
      const std::size_t needed = buffers_.shortage(queued_, dirty.size());
      for (std::size_t i = 0; i < needed; ++i) launder(*dirty[i]);
      if (needed > 0) continue;
      if (!buffers_.one_will_be_spare(queued_)) buffer = buffers_.wanted_last(queued_);
      if (buffer == nullptr) {
        changed_.wait(lock);
        continue;
      }
    }
    if (buffer->dirty()) launder(*buffer);
    if (settle(lock, *buffer)) {
      buffers_.rename(*buffer, key);
      buffer->state = BufferState::assigned;
      buffer->reads.clear();
      return buffer;
    }
  }
  return nullptr;
}

void StepPipeline::Impl::submit_reads(const StepTask& task, Buffer& buffer, bool read_record,
                                      bool read_param) {
  const auto read = [&](const Location& from, std::size_t at, std::size_t nbytes) {
    buffer.reads.push_back(transfer(IoKind::read, buffer, at, nbytes, from.file_offset));
  };
  if (read_record) read(task.record, 0, layout_.record_bytes());
  if (read_param) read(task.param, layout_.param_at(), layout_.param_bytes());
  if (task.grad.in_file()) read(task.grad, layout_.grad_at(), layout_.grad_bytes());
}

void StepPipeline::Impl::update_tasks() {
  CallerCpu cpu;
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopping() || !queued_.empty() || !staged_.empty(); });
    {
      const Stopwatch watch(stats_.write_wait_s);
      changed_.wait(lock, [&] { return stopping() || !staged_.empty(); });
    }
    if (stopping()) return;
    current_ = std::move(staged_.front());
    staged_.pop_front();
    changed_.notify_all();  // the stager may read for one task more
    Buffer* const buffer = current_->buffer;

    double read_wait_s = 0, write_wait_s = 0, adam_s = 0;
    lock.unlock();
    if (buffer != nullptr) {
      {
        const Stopwatch watch(read_wait_s);
        for (const OpPtr& read : buffer->reads) read->wait();
      }
      // A kept buffer may still be on its way to the file with its previous content.
      const Stopwatch watch(write_wait_s);
      for (const OpPtr& write : buffer->writes) write->wait();
    }
    lock.lock();
    stats_.read_wait_s += read_wait_s;
    stats_.write_wait_s += write_wait_s;
    if (stopping()) return;
    if (buffer != nullptr) buffer->writes.clear();
    changed_.wait(lock, [&] { return stopping() || updates_until_hold_ != 0U; });
    if (stopping()) return;
    if (updates_until_hold_) --*updates_until_hold_;
    if (updates_until_fault_ && (*updates_until_fault_)-- == 0) {
      lock.unlock();
      fail_in_pool(current_->task.key);
    }

    // From here to the submission of the writes nothing stops the task: half of an update in RAM
    // and the other half not in the file would be worse than none.
    lock.unlock();
    cpu.follow();
    {
      const Stopwatch watch(adam_s);
      update(*current_);
    }
    lock.lock();
    stats_.adam_s += adam_s;
    ++stats_.tasks;
    if (buffer != nullptr) submit_writes(current_->task, *buffer);
    current_.reset();
    changed_.notify_all();
  }
}

void StepPipeline::Impl::update(const Work& work) const {
  const StepTask& task = work.task;
  const auto part = [&](const Location& location, std::size_t at) {
    return location.in_file() ? work.buffer->memory + at : location.address;
  };
  char* const record = part(task.record, 0);
  char* const param = part(task.param, layout_.param_at());
  char* const grad = part(task.grad, layout_.grad_at());
  UpdateArrays whole = {.param = param, .grad = grad, .master = record};
  for (std::size_t i = 0; i < layout_.kind.states(); ++i) {
    whole.states[i] = record + layout_.state_at(i);
  }
  std::vector<UpdateSlice> slices;
  slices.reserve(task.segments.size());
  for (const auto& [first, numel, hyper, index] : task.segments) {
    slices.push_back(
        {advanced(whole, layout_.kind, first), numel, (*work.constants)[hyper], index});
  }
  hetero::update(layout_.kind, slices);
}

// Whether an update's record is not to stay dirty.
bool StepPipeline::Impl::write_at_once(std::int64_t key) const {
  if (queued_.repeats()) return !queued_.keeps(key) && !queued_.is_queued(key);
  return queued_.next_use(key) == WorkQueue::kNever && buffers_.shortage(queued_, 1) > 0;
}

// With the lock held, so that close() sees every write that was started.
void StepPipeline::Impl::submit_writes(const StepTask& task, Buffer& buffer) {
  buffer.keeps_record = task.record.in_file();
  buffer.keeps_param = task.param.in_file();
  if (buffer.keeps_record) {
    buffer.dirty_at = task.record.file_offset;
    if (write_at_once(buffer.key)) submit_record_write(buffer);
  }
  if (buffer.keeps_param) {
    submit_write(buffer, layout_.param_at(), layout_.param_bytes(), task.param.file_offset);
  }
  buffer.state = buffer.writes.empty() ? BufferState::idle : BufferState::writing;
  buffers_.touch(buffer);
}

// --- the handle -----------------------------------------------------------------------------

StepPipeline::StepPipeline(std::shared_ptr<IoEngine> engine, int file, char* memory,
                           std::size_t memory_bytes, std::size_t buffers, const PieceLayout& layout,
                           std::shared_ptr<const void> keeper)
    : owner_(getpid()) {
  if (engine == nullptr) {
    buffers = 0;
  } else if (buffers == 0) {
    throw std::invalid_argument("StepPipeline: buffers is 0, must be at least 1 with an engine");
  } else if (memory == nullptr) {
    throw std::invalid_argument("StepPipeline: an engine needs an arena for its buffers");
  } else if (buffers > memory_bytes / layout.buffer_bytes()) {
    throw std::invalid_argument("StepPipeline: the arena has " + std::to_string(memory_bytes) +
                                " bytes, " + std::to_string(buffers) + " buffers of " +
                                std::to_string(layout.buffer_bytes()) + " bytes need more");
  }
  impl_ =
      std::make_unique<Impl>(std::move(engine), file, memory, buffers, layout, std::move(keeper));
}

StepPipeline::~StepPipeline() {
  close();
  // In a forked child the threads are gone and a lock may be held for ever: leave it all behind.
  if (getpid() != owner_) static_cast<void>(impl_.release());
}

StepPipeline::Impl& StepPipeline::impl() const {
  if (getpid() != owner_) {
    throw std::runtime_error("this step pipeline belongs to process " + std::to_string(owner_) +
                             "; make another one after fork()");
  }
  return *impl_;
}

void StepPipeline::submit(std::vector<StepTask> tasks, std::span<const Hyper> hypers) {
  impl().submit(std::move(tasks), hypers);
}

void StepPipeline::expect(std::vector<Expectation> expected, std::size_t streaming) {
  impl().expect(std::move(expected), streaming);
}

void StepPipeline::wait_updated(std::int64_t key) { impl().wait_updated(key); }

bool StepPipeline::is_updated(std::int64_t key) const { return impl().is_updated(key); }

bool StepPipeline::is_written(std::int64_t key) const { return impl().is_written(key); }

void StepPipeline::wait_written(std::int64_t key) { impl().wait_written(key); }

void StepPipeline::flush(std::int64_t key) { impl().flush(key); }

void StepPipeline::forget(std::int64_t key) { impl().forget(key); }

StepStats StepPipeline::stats() const { return impl().stats(); }

void StepPipeline::inject(std::uint64_t nth) { impl().inject(nth); }

void StepPipeline::hold(std::uint64_t nth) { impl().hold(nth); }

void StepPipeline::release() { impl().release(); }

void StepPipeline::close() {
  if (getpid() == owner_) impl_->close();
}

}  // namespace hetero
