// The calls of the step pipeline. Its threads are in step_threads.cpp.
#include "pipeline/step_pipeline.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/quiet_thread.h"

namespace hetero {
namespace {

// The number of buffers, if they fit into the memory; 0 without an engine.
std::size_t checked_buffers(bool has_engine, const Arena* arena, std::size_t buffers,
                            const TileLayout& layout) {
  if (!has_engine) return 0;
  if (buffers == 0) {
    throw std::invalid_argument("StepPipeline: buffers is 0, must be at least 1 with an engine");
  }
  if (arena == nullptr) {
    throw std::invalid_argument("StepPipeline: an engine needs an arena for its buffers");
  }
  if (buffers > arena->nbytes() / layout.buffer_bytes()) {
    throw std::invalid_argument("StepPipeline: the arena has " + std::to_string(arena->nbytes()) +
                                " bytes, " + std::to_string(buffers) + " buffers of " +
                                std::to_string(layout.buffer_bytes()) + " bytes need more");
  }
  return buffers;
}

}  // namespace

StepPipeline::StepPipeline(std::shared_ptr<IoEngine> engine, int file, const Arena* arena,
                           std::size_t buffers, const TileLayout& layout)
    : layout_(layout),
      engine_(std::move(engine)),
      file_(file),
      has_checksums_(engine_ != nullptr && engine_->has_checksums(file)),
      buffers_(arena == nullptr ? nullptr : reinterpret_cast<char*>(arena->address()),
               checked_buffers(engine_ != nullptr, arena, buffers, layout_),
               layout_.buffer_bytes()),
      policy_(queued_, buffers_),
      pages_(arena == nullptr ? nullptr : arena->hold_pages()) {
  stager_ = quiet_thread("hetero-stage", [this] { thread_main(&StepPipeline::stage_tasks); });
  try {
    updater_ = quiet_thread("hetero-step", [this] { thread_main(&StepPipeline::update_tasks); });
  } catch (...) {
    close();
    throw;
  }
}

// --- submitting and waiting -----------------------------------------------------------------

void StepPipeline::submit(std::vector<StepTask> tasks, std::span<const Hyper> hypers,
                          const std::optional<UpdateKind>& other) {
  guard_.require_own();
  const UpdateKind kind = other.value_or(layout_.kind);
  for (const StepTask& task : tasks) {
    task.check(layout_, hypers.size(), engine_ != nullptr);
    layout_.check(kind, task.param.in_file(), task.grad.in_file());
  }
  auto constants = std::make_shared<std::vector<UpdateConstants>>();
  for (const Hyper& hyper : hypers) {
    hyper.validate();
    constants->push_back(make_constants(kind, hyper));
  }
  const MutexLock lock(mutex_);
  settle_all();
  throw_if_closed();
  for (StepTask& task : tasks) {
    ++unfinished_[task.key];
    queued_.push({std::move(task), kind, constants});
  }
  note_unfinished();
  changed_.notify_all();
}

void StepPipeline::expect(std::vector<Expectation> expected, std::size_t streaming) {
  guard_.require_own();
  for (const Expectation& each : expected) each.check(layout_, engine_ != nullptr);
  std::erase_if(expected, [](const Expectation& each) { return !each.in_file(); });
  const MutexLock lock(mutex_);
  settle_all();
  throw_if_closed();
  policy_.expect(std::move(expected), streaming);
  changed_.notify_all();
}

bool StepPipeline::take_back(std::int64_t first, std::size_t count) {
  const MutexLock lock(mutex_, guard_);
  throw_if_failed();
  if (!queued_.take_back(first, count)) return false;
  for (std::size_t i = 0; i < count; ++i) {  // (an earlier task may be under way)
    const auto unfinished = unfinished_.find(first + static_cast<std::int64_t>(i));
    if (--unfinished->second == 0) unfinished_.erase(unfinished);
  }
  note_unfinished();
  changed_.notify_all();
  return true;
}

bool StepPipeline::keeps(std::int64_t key) const {
  const MutexLock lock(mutex_, guard_);
  return queued_.keeps(key);
}

void StepPipeline::wait_updated(std::int64_t key) {
  const MutexLock lock(mutex_, guard_);
  wait_until_updated(key);
  settle_all();
}

bool StepPipeline::is_updated(std::int64_t key) const {
  const MutexLock lock(mutex_, guard_);
  return failure_ != nullptr || !is_unfinished(key);
}

bool StepPipeline::is_written(std::int64_t key) const {
  const MutexLock lock(mutex_, guard_);
  if (failure_ != nullptr) return true;
  return !is_unfinished(key) && all_done(writes_of(key));
}

void StepPipeline::wait_written(std::int64_t key) {
  const MutexLock lock(mutex_, guard_);
  wait_until_updated(key);
  // A buffer that has been reused since was written before: the stager waits for that.
  const Operations writes = writes_of(key);
  std::exception_ptr error;
  {
    const MutexUnlock unlocked(mutex_);
    error = wait_for_all(writes);
  }
  if (error) fail(error);
  settle_all();
}

void StepPipeline::flush(std::int64_t key) {
  {
    const MutexLock lock(mutex_, guard_);
    wait_until_updated(key);
    throw_if_closed();
    for (Buffer& buffer : buffers_) {
      if (key != kAnyKey && buffer.key != key) continue;
      // (A task submitted since may have it.)
      if (buffer.state != BufferState::assigned && buffer.dirty()) write_back(buffer);
    }
  }
  wait_written(key);
}

void StepPipeline::forget(std::int64_t key) {
  {
    const MutexLock lock(mutex_, guard_);
    queued_.forget_expected(key);
  }
  flush(key);
  const MutexLock lock(mutex_);
  for (Buffer& buffer : buffers_) {
    const auto matches = [&] { return key == kAnyKey || buffer.key == key; };
    while (matches() && buffer.state == BufferState::reading) settle(buffer);
    if (!matches()) continue;
    if (buffer.state != BufferState::idle || buffer.dirty()) continue;  // a task submitted since
    buffers_.forget(buffer);
  }
}

StepStats StepPipeline::stats() const {
  const MutexLock lock(mutex_, guard_);
  return stats_;
}

void StepPipeline::give_up(const std::string& why) {
  const MutexLock lock(mutex_, guard_);
  fail(std::make_exception_ptr(std::runtime_error(why)));
}

void StepPipeline::inject(std::uint64_t nth) {
  const MutexLock lock(mutex_, guard_);
  updates_until_fault_ = nth;
}

void StepPipeline::hold(std::uint64_t nth) {
  const MutexLock lock(mutex_, guard_);
  updates_until_hold_ = nth;
}

void StepPipeline::release() {
  const MutexLock lock(mutex_, guard_);
  updates_until_hold_.reset();
  changed_.notify_all();
}

void StepPipeline::close() {
  if (foreign()) return;
  const MutexLock closing(closing_mutex_);
  {
    const MutexLock lock(mutex_);
    closing_ = true;
    changed_.notify_all();
  }
  if (stager_.joinable()) stager_.join();
  if (updater_.joinable()) updater_.join();
  // The engine may still be using the buffers' memory. (Waiters may clear the lists meanwhile.)
  Operations reads, writes;
  {
    const MutexLock lock(mutex_);
    for (const Buffer& buffer : buffers_) {
      reads.insert(reads.end(), buffer.reads.begin(), buffer.reads.end());
    }
    writes = writes_of(kAnyKey);
  }
  for (const auto& read : reads) abandon(*engine_, *read);
  const std::exception_ptr error = wait_for_all(writes);
  const MutexLock lock(mutex_);
  if (error) fail(error);
  std::size_t abandoned = 0;
  for (const auto& [key, count] : unfinished_) abandoned += count;
  if (abandoned > 0) {
    fail(std::make_exception_ptr(std::runtime_error("the step pipeline was closed before " +
                                                    std::to_string(abandoned) +
                                                    " submitted updates were made")));
  }
  pages_.reset();
  changed_.notify_all();
}

// --- with the lock held ---------------------------------------------------------------------

bool StepPipeline::is_unfinished(std::int64_t key) const {
  return key == kAnyKey ? !unfinished_.empty() : unfinished_.contains(key);
}

void StepPipeline::note_unfinished() {
  const auto now = Clock::now();
  if (busy_since_) stats_.busy_s += std::chrono::duration<double>(now - *busy_since_).count();
  busy_since_.reset();
  if (!unfinished_.empty()) busy_since_ = now;
}

void StepPipeline::note_computing() {
  const auto now = Clock::now();
  if (posted_ > 0) {
    stats_.compute_s += std::chrono::duration<double>(now - computing_noted_).count();
  }
  computing_noted_ = now;
}

void StepPipeline::wait_until_updated(std::int64_t key) {
  ++waiting_;
  hurry_last_begun();
  while (failure_ == nullptr && is_unfinished(key)) changed_.wait(mutex_);
  --waiting_;
  throw_if_failed();
}

void StepPipeline::hurry_last_begun() {
  if (waiting_ == 0 || under_way_.empty()) return;
  const Update& last = under_way_.back();
  if (last.job != nullptr || last.work.buffer == nullptr) return;
  for (const auto& read : last.work.buffer->reads) engine_->hurry(*read);
  for (const auto& write : last.work.buffer->writes) engine_->hurry(*write);
}

void StepPipeline::throw_if_closed() const {
  if (closing_) throw std::runtime_error("the step pipeline is closed");
}

void StepPipeline::throw_if_failed() const {
  if (failure_ != nullptr) std::rethrow_exception(failure_);
}

void StepPipeline::fail(std::exception_ptr error) {
  if (failure_ == nullptr) failure_ = std::move(error);
  queued_.clear();
  staged_.clear();
  staged_with_buffers_ = 0;
  unfinished_.clear();
  note_unfinished();
  changed_.notify_all();
}

// Notices the transfers that are done, so that a failed write is not overlooked. Throws the
// failure.
void StepPipeline::settle_all() {
  try {
    for (Buffer& buffer : buffers_) buffer.settle();
  } catch (...) {
    fail(std::current_exception());
  }
  throw_if_failed();
}

Operations StepPipeline::writes_of(std::int64_t key) const {
  Operations writes;
  for (const Buffer& buffer : buffers_) {
    if (key != kAnyKey && buffer.key != key) continue;
    writes.insert(writes.end(), buffer.writes.begin(), buffer.writes.end());
  }
  return writes;
}

std::shared_ptr<IoOp> StepPipeline::transfer(IoKind kind, const Buffer& buffer, std::size_t at,
                                             std::size_t nbytes, std::int64_t offset) const {
  PageChecksums::Checksums checksums;
  if (kind == IoKind::write && has_checksums_) {
    const std::span all(buffer.checksums);
    const auto part =
        all.subspan(at / PageChecksums::kPageBytes, nbytes / PageChecksums::kPageBytes);
    checksums.assign(part.begin(), part.end());
  }
  return engine_->submit(kind, file_, buffer.memory + at, nbytes,
                         static_cast<std::uint64_t>(offset), IoTurn::idle, std::move(checksums));
}

// Starts a write. The buffer's state is the caller's to change.
void StepPipeline::submit_write(Buffer& buffer, std::size_t at, std::size_t nbytes,
                                std::int64_t offset) {
  buffer.writes.push_back(transfer(IoKind::write, buffer, at, nbytes, offset));
  stats_.written_bytes += nbytes;
}

void StepPipeline::submit_state_write(Buffer& buffer) {
  submit_write(buffer, 0, layout_.optim_state_bytes(), buffer.dirty_at);
  buffer.dirty_at = Buffer::kClean;
}

// Starts the write that an idle buffer's dirty optimizer state lacks. A failure stops the pipeline.
void StepPipeline::write_back(Buffer& buffer) {
  try {
    submit_state_write(buffer);
  } catch (...) {
    fail(std::current_exception());
    throw;
  }
  buffer.state = BufferState::writing;
}

// Whether the buffer is idle. If not, waits without the lock until its transfers are done: all may
// have changed then. Reads ahead are cut off, because no task wants them.
bool StepPipeline::settle(Buffer& buffer) {
  if (buffer.settle()) return true;
  const Operations writes = buffer.writes;
  Operations reads;
  if (buffer.state == BufferState::reading) {
    reads = buffer.reads;
    buffer.drop();
  }
  const MutexUnlock unlocked(mutex_);
  for (const auto& read : reads) abandon(*engine_, *read);
  for (const auto& write : writes) write->wait();
  return false;
}

bool StepPipeline::is_consistent() const {
  std::size_t assigned = 0;
  for (const Buffer& buffer : buffers_) assigned += buffer.state == BufferState::assigned ? 1 : 0;
  std::size_t owned = 0, staged = 0;
  const auto owns = [&](const Work& work) {
    if (work.buffer == nullptr) return true;
    ++owned;
    return work.buffer->state == BufferState::assigned && work.buffer->key == work.task.key;
  };
  for (const Work& work : staged_) {
    if (!owns(work)) return false;
    staged += work.buffer == nullptr ? 0 : 1;
  }
  std::size_t posted = 0;
  for (const Update& update : under_way_) {
    if (!owns(update.work)) return false;
    posted += update.job == nullptr ? 0 : 1;
  }
  if (queued_.front_is_held()) ++owned;
  return assigned == owned && staged == staged_with_buffers_ && posted == posted_ &&
         buffers_.is_consistent();
}

}  // namespace hetero
