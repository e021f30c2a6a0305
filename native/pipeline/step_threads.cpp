// The step pipeline's two threads, the stager and the updater, and what other threads do for them.
#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/worker_pool.h"
#include "pipeline/step_pipeline.h"

namespace hetero {

void StepPipeline::thread_main(void (StepPipeline::*loop)()) {
  try {
    (this->*loop)();
  } catch (...) {
    const MutexLock lock(mutex_);
    fail(std::current_exception());
  }
}

// --- the stager -----------------------------------------------------------------------------

void StepPipeline::stage_tasks() {
  const MutexLock lock(mutex_);
  while (!stopping()) {
    if ((queued_.empty() || policy_.reads_ahead_first()) && read_ahead()) continue;
    if (queued_.empty() ||
        (queued_.front().task.needs_buffer() && staged_with_buffers_ >= policy_.most_staged())) {
      changed_.wait(mutex_);  // another task may be the first then
    } else {
      stage_first();
    }
  }
}

// Gives the first task its buffer and submits its reads; or nothing, if meanwhile the pipeline
// stops or another task becomes the first.
void StepPipeline::stage_first() {
  if (queued_.front().task.needs_buffer()) {
    const StepTask task = queued_.front().task;
    Buffer* const buffer = acquire(task, queued_.front().place);
    if (buffer == nullptr || stopping()) return;
    // It stays in the queue until it is staged: it is one of those that waiters wait for.
    queued_.hold_front();
    const bool read_state = task.optim_state.in_file() && !buffer->keeps_optim_state;
    const bool read_param = task.param.in_file() && !buffer->keeps_param;
    const bool cacheable = task.optim_state.in_file() || task.param.in_file();
    const bool saves = task.saved_param != StepTask::kNone;
    if (cacheable && !read_state && !read_param) {
      ++(buffer->read_ahead ? stats_.ahead : stats_.hits);
    }
    buffer->read_ahead = false;
    if (read_state) stats_.read_bytes += layout_.optim_state_bytes();
    if (read_param) stats_.read_bytes += layout_.param_bytes();
    if (task.grad.in_file()) stats_.read_bytes += layout_.grad_bytes();
    if (saves) stats_.written_bytes += layout_.param_bytes();
    // What only the buffer has is what the update has to leave in the file.
    if (task.optim_state_to != StepTask::kNone && buffer->dirty()) submit_state_write(*buffer);
    {
      const MutexUnlock unlocked(mutex_);
      const auto read = [&](const Location& from, std::size_t at, std::size_t nbytes) {
        buffer->reads.push_back(transfer(IoKind::read, *buffer, at, nbytes, from.file_offset));
      };
      if (read_state) read(task.optim_state, 0, layout_.optim_state_bytes());
      if (read_param) read(task.param, layout_.param_at(), layout_.param_bytes());
      if (task.grad.in_file()) read(task.grad, layout_.grad_at(), layout_.grad_bytes());
      if (saves) {
        buffer->reads.push_back(
            engine_->submit(IoKind::write, file_, task.param.address, layout_.param_bytes(),
                            static_cast<std::uint64_t>(task.saved_param), IoTurn::idle));
      }
    }
    if (stopping()) return;
    queued_.front().buffer = buffer;
    ++staged_with_buffers_;
  }
  staged_.push_back(queued_.pop());
  HETERO_CHECK(is_consistent());
  changed_.notify_all();
}

// Takes one step of reading ahead; false if there is none to take before something changes.
bool StepPipeline::read_ahead() {
  const auto [next, buffer] = policy_.choose_read_ahead();
  if (buffer == nullptr) return false;
  if (buffer->dirty()) write_back(*buffer);
  if (!settle(*buffer)) return true;
  buffers_.rename(*buffer, next->key);
  // (Under the lock, so that close() sees every read that was started.)
  buffer->state = BufferState::reading;
  buffer->read_ahead = true;
  buffer->keeps_optim_state = next->optim_state.in_file();
  buffer->keeps_param = next->param.in_file();
  buffer->optim_state_at = next->optim_state.file_offset;
  buffer->param_at = next->param.file_offset;
  buffer->reads.clear();
  const auto read = [&](const Location& from, std::size_t at, std::size_t nbytes) {
    mutex_.assert_held();
    buffer->reads.push_back(transfer(IoKind::read, *buffer, at, nbytes, from.file_offset));
    stats_.read_bytes += nbytes;
  };
  if (buffer->keeps_optim_state) read(next->optim_state, 0, layout_.optim_state_bytes());
  if (buffer->keeps_param) read(next->param, layout_.param_at(), layout_.param_bytes());
  return true;
}

// The buffer that keeps the content of the first task's key, or one to give up; nullptr if the
// pipeline stops, or if another task becomes the first.
Buffer* StepPipeline::acquire(const StepTask& task, QueuePlace place) {
  Buffer* kept = nullptr;
  for (;;) {
    if (!is_first(place)) return nullptr;
    kept = buffers_.find(task.key);
    if (kept == nullptr) return take_another(task.key, place);
    if (kept->state == BufferState::assigned) {
      changed_.wait(mutex_);  // while an earlier task with the same key has it, the file is behind
    } else if (kept->state == BufferState::reading && !kept->read_ahead) {
      settle(*kept);  // its reads were cut off, for forget()
    } else if (!kept->dirty() && !kept->keeps_current(task)) {
      // What an update has left that is made again.
      if (settle(*kept)) kept->drop();
    } else {
      break;
    }
  }
  if (kept->dirty() && kept->dirty_at != task.optim_state.file_offset) {
    throw std::logic_error(
        "StepTask " + std::to_string(task.key) +
        ": its optimizer state was moved while a buffer keeps what belongs to offset " +
        std::to_string(kept->dirty_at) + "; call forget() before moving it");
  }
  // (The updater waits for the writes of a kept buffer, and for what is still being read ahead;
  // reads of other parts may start now.)
  if (kept->state != BufferState::reading) kept->reads.clear();
  kept->state = BufferState::assigned;
  return kept;
}

// A buffer for the content of `key`, which none has; nullptr as from acquire().
Buffer* StepPipeline::take_another(std::int64_t key, QueuePlace place) {
  while (is_first(place)) {
    const auto [buffer, dirty] = policy_.choose(place);
    if (buffer == nullptr) {
      for (Buffer* each : dirty) write_back(*each);
      if (dirty.empty()) changed_.wait(mutex_);
      continue;
    }
    if (buffer->dirty()) write_back(*buffer);
    if (settle(*buffer)) {
      buffers_.rename(*buffer, key);
      buffer->state = BufferState::assigned;
      buffer->reads.clear();
      return buffer;
    }
  }
  return nullptr;
}

// --- the updater ----------------------------------------------------------------------------

void StepPipeline::update_tasks() {
  const MutexLock lock(mutex_);
  std::exception_ptr error;
  try {
    while (!stopping()) {
      if (can_begin()) {
        begin_update();
      } else {
        compute_or_wait();
      }
    }
  } catch (...) {
    error = std::current_exception();
  }
  // What is posted is made: half of an update in RAM and the other half not in the file would be
  // worse than none.
  while (posted_ > 0) compute_or_wait();
  if (error) std::rethrow_exception(error);
}

// Whether the next task is to be begun: it is staged, no task of its tile is under way, and either
// threads would have too few blocks without it, and its transfers are done, or there is nothing
// else to do than to wait for them.
bool StepPipeline::can_begin() const {
  if (staged_.empty()) return false;
  const Work& next = staged_.front();
  std::size_t blocks = 0;
  for (const Update& update : under_way_) {
    if (update.work.task.key == next.task.key) return false;
    blocks += update.job->left();
  }
  if (blocks == 0) return true;
  if (blocks >= 2 * std::size_t{WorkerPool::instance().threads()}) return false;
  return next.buffer == nullptr || (all_done(next.buffer->reads) && all_done(next.buffer->writes));
}

// Takes the next task and posts it; or only takes it, if the pipeline stops.
void StepPipeline::begin_update() {
  Update& update = under_way_.emplace_back(std::move(staged_.front()));
  staged_.pop_front();
  Buffer* const buffer = update.work.buffer;
  if (buffer != nullptr) {
    --staged_with_buffers_;
    changed_.notify_all();  // the stager may read for one task more
  }
  hurry_last_begun();
  if (!wait_for_transfers(buffer)) return;
  while (!stopping() && updates_until_hold_ == 0U) compute_or_wait();
  if (stopping()) return;
  if (updates_until_hold_) --*updates_until_hold_;
  const bool fails = updates_until_fault_ && (*updates_until_fault_)-- == 0;
  post(update, fails);
  while (fails && !stopping()) compute_or_wait();  // no update after it is begun
}

// Waits without the lock for a task's reads, and for the writes of what its buffer kept before;
// false if the pipeline stops.
bool StepPipeline::wait_for_transfers(Buffer* buffer) {
  if (buffer != nullptr) {
    const MutexUnlock unlocked(mutex_);
    for (const auto& read : buffer->reads) read->wait();
    for (const auto& write : buffer->writes) write->wait();
  }
  if (stopping()) return false;
  if (buffer != nullptr) buffer->writes.clear();
  return true;
}

// Posts the update to the worker pool, or one that only throws in its place.
void StepPipeline::post(Update& update, bool fails) {
  const auto blocks = std::make_shared<UpdateBlocks>(update.work.kind, slices_of(update.work));
  const auto compute = [blocks, fails, key = update.work.task.key](std::size_t i) {
    if (fails) {
      throw std::runtime_error("the update of tile " + std::to_string(key) + " was made to fail");
    }
    blocks->compute(i);
  };
  const auto end = [this, blocks, &update](std::exception_ptr error) {
    blocks->note_end();
    try {
      if (!error) note_checksums(update.work);
    } catch (...) {
      error = std::current_exception();
    }
    end_update(update, std::move(error));
  };
  const auto job = std::make_shared<Job>(fails ? 1 : blocks->count(), compute, end);
  note_computing();
  update.job = job;
  ++posted_;
  try {
    const MutexUnlock unlocked(mutex_);  // workers may end the update before this returns
    WorkerPool::instance().post(job);
  } catch (...) {
    note_computing();
    update.job = nullptr;
    --posted_;
    throw;
  }
}

std::vector<UpdateSlice> StepPipeline::slices_of(const Work& work) const {
  const StepTask& task = work.task;
  const auto part = [&](const Location& location, std::size_t at) {
    return location.in_file() ? work.buffer->memory + at : location.address;
  };
  char* const optim_state = part(task.optim_state, 0);
  char* const param = part(task.param, layout_.param_at());
  char* const grad = part(task.grad, layout_.grad_at());
  UpdateArrays whole = {.param = param, .grad = grad, .master = optim_state};
  for (std::size_t i = 0; i < work.kind.states(); ++i) {
    whole.states[i] = optim_state + layout_.state_at(i);
  }
  std::vector<UpdateSlice> slices;
  slices.reserve(task.segments.size());
  for (const auto& [first, numel, hyper, index] : task.segments) {
    slices.push_back({advanced(whole, work.kind, first), numel, (*work.constants)[hyper], index});
  }
  return slices;
}

// Computes a block of the first update that has one left; if none has, waits for a change.
void StepPipeline::compute_or_wait() {
  for (const Update& update : under_way_) {
    if (update.job == nullptr || update.job->left() == 0) continue;
    const std::shared_ptr<Job> job = update.job;
    const MutexUnlock unlocked(mutex_);
    job->make_one_call();
    return;
  }
  changed_.wait(mutex_);
}

// --- the threads that compute ---------------------------------------------------------------

// Of what the update has left in its buffer, for the writes to come: they are submitted with the
// lock held, when there is no time for it.
void StepPipeline::note_checksums(const Work& work) const {
  if (work.buffer == nullptr || !has_checksums_) return;
  Buffer& buffer = *work.buffer;
  buffer.checksums.resize(layout_.grad_at() / PageChecksums::kPageBytes);
  const auto note = [&](std::size_t at, std::size_t nbytes) {
    const auto* const memory = reinterpret_cast<const std::byte*>(buffer.memory + at);
    const auto first = static_cast<std::ptrdiff_t>(at / PageChecksums::kPageBytes);
    std::ranges::copy(PageChecksums::of(memory, nbytes), buffer.checksums.begin() + first);
  };
  if (work.task.optim_state.in_file()) note(0, layout_.optim_state_bytes());
  if (work.task.param.in_file()) note(layout_.param_at(), layout_.param_bytes());
}

void StepPipeline::end_update(Update& update, std::exception_ptr error) {
  const MutexLock lock(mutex_);
  update.computed = true;
  update.error = std::move(error);
  while (!under_way_.empty() && under_way_.front().computed) end_first_update();
  HETERO_CHECK(stopping() || is_consistent());
  changed_.notify_all();
}

// The failure of one update stops the pipeline, but no other update that is under way.
void StepPipeline::end_first_update() {
  const Update& update = under_way_.front();
  note_computing();
  --posted_;
  try {
    if (update.error) std::rethrow_exception(update.error);
    ++stats_.tasks;
    if (update.work.buffer != nullptr) submit_writes(update.work, *update.work.buffer);
    const auto unfinished = unfinished_.find(update.work.task.key);  // none after a failure
    if (unfinished != unfinished_.end() && --unfinished->second == 0) unfinished_.erase(unfinished);
    note_unfinished();
  } catch (...) {
    fail(std::current_exception());
  }
  under_way_.pop_front();
}

// With the lock held, so that close() sees every write that was started.
void StepPipeline::submit_writes(const Work& work, Buffer& buffer) {
  const StepTask& task = work.task;
  // The second pass follows, and wants what the first one has left.
  const bool is_first_pass = work.kind.rule == Rule::muon_momentum;
  const bool state_moves = task.optim_state_to != StepTask::kNone;
  buffer.keeps_optim_state = task.optim_state.in_file();
  buffer.keeps_param = task.param.in_file() || (is_first_pass && buffer.keeps_param);
  if (buffer.keeps_optim_state) {
    buffer.dirty_at = state_moves ? task.optim_state_to : task.optim_state.file_offset;
    buffer.optim_state_at = buffer.dirty_at;
    const bool at_once = state_moves || policy_.writes_at_once(buffer.key);
    if (at_once && !is_first_pass) submit_state_write(buffer);
  }
  if (task.param.in_file()) {
    buffer.param_at = task.param_to == StepTask::kNone ? task.param.file_offset : task.param_to;
    submit_write(buffer, layout_.param_at(), layout_.param_bytes(), buffer.param_at);
  }
  buffer.state = buffer.writes.empty() ? BufferState::idle : BufferState::writing;
  buffers_.touch(buffer);
}

}  // namespace hetero
