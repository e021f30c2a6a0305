#include "step_pipeline.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <limits>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "quiet_thread.h"

namespace hetero {
namespace {

constexpr std::int64_t kNoKey = -1;
constexpr std::size_t kPageBytes = 4096;

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

enum class BufferState {
  idle,      // nobody's; may keep the clean content of `key`
  assigned,  // a task's that is not updated yet: its reads fill it, its update changes it
  writing,   // the engine's, until its writes are done; then idle
};

// Fields change under the pipeline's lock, except `reads`, which belongs to the task.
struct Buffer {
  char* memory = nullptr;
  BufferState state = BufferState::idle;
  std::int64_t key = kNoKey;  // whose content is here, or is on its way
  bool keeps_record = false;
  bool keeps_param = false;
  std::uint64_t last_used = 0;
  std::vector<OpPtr> reads;
  std::vector<OpPtr> writes;
};

using Constants = std::shared_ptr<const std::vector<UpdateConstants>>;

// A submitted task.
struct Work {
  StepTask task;
  Constants constants;
  Buffer* buffer = nullptr;  // none if the task lives in RAM
};

bool needs_buffer(const StepTask& task) {
  return task.param.in_file() || task.grad.in_file() || task.record.in_file();
}

[[noreturn]] void refuse(const StepTask& task, const std::string& fact) {
  throw std::invalid_argument("StepTask " + std::to_string(task.key) + ": " + fact);
}

}  // namespace

class StepPipeline::Impl {
 public:
  Impl(std::shared_ptr<IoEngine> engine, int file, char* memory, std::size_t buffers,
       const PieceLayout& layout)
      : layout_(layout), engine_(std::move(engine)), file_(file), buffers_(buffers) {
    for (std::size_t i = 0; i < buffers; ++i) {
      buffers_[i].memory = memory + i * layout_.buffer_bytes();
    }
    stager_ = quiet_thread("hetero-stage", [this] { thread_main(&Impl::stage_tasks); });
    try {
      updater_ = quiet_thread("hetero-step", [this] { thread_main(&Impl::update_tasks); });
    } catch (...) {
      close();
      throw;
    }
  }

  void submit(std::vector<StepTask> tasks, std::span<const Hyper> hypers);
  void wait_updated();
  void wait_written(std::int64_t key);
  void forget(std::int64_t key);
  StepStats stats() const;
  void close();

 private:
  using Lock = std::unique_lock<std::mutex>;

  void thread_main(void (Impl::*loop)());

  // The stager.
  void stage_tasks();
  Buffer* acquire(Lock& lock, std::int64_t key);
  Buffer* find_victim();
  void submit_reads(const StepTask& task, Buffer& buffer, bool read_record, bool read_param);

  // The updater.
  void update_tasks();
  void update(const Work& work) const;
  void submit_writes(const StepTask& task, Buffer& buffer);

  // With the lock held.
  bool stopping() const { return closing_ || failure_ != nullptr; }
  bool unfinished(std::int64_t key) const;
  bool settled(Buffer& buffer);
  void settle_all();
  void fail(std::exception_ptr error);
  void throw_if_failed() const;

  void check(const StepTask& task, std::size_t hypers) const;
  void check(const StepTask& task, const Location& location, const char* name, bool has_room) const;
  std::vector<OpPtr> writes_of(std::int64_t key) const;

  const PieceLayout layout_;
  const std::shared_ptr<IoEngine> engine_;
  const int file_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // any of what follows
  std::vector<Buffer> buffers_;
  std::deque<Work> queued_;      // no buffer yet
  std::deque<Work> staged_;      // reads submitted
  std::optional<Work> current_;  // the updater's; changed by it alone
  std::uint64_t clock_ = 0;      // orders the uses of buffers
  StepStats stats_;
  bool closing_ = false;
  std::exception_ptr failure_;  // the first

  std::mutex closing_turn_;
  std::thread stager_;
  std::thread updater_;
};

// --- submitting and waiting -----------------------------------------------------------------

void StepPipeline::Impl::check(const StepTask& task, const Location& location, const char* name,
                               bool has_room) const {
  const bool offset_given = location.file_offset >= 0;
  if (location.in_file() != offset_given) {
    refuse(task, std::string(name) + (offset_given ? " has both an address and a file offset"
                                                   : " has neither an address nor a file offset"));
  }
  if (!location.in_file()) return;
  if (engine_ == nullptr) {
    refuse(task, std::string(name) + " is in the file, but the pipeline has no engine");
  }
  if (!has_room) {
    refuse(task, std::string(name) + " is in the file, but the buffers have no room for it");
  }
  if (location.file_offset % static_cast<std::int64_t>(kPageBytes) != 0) {
    refuse(task, std::string(name) + "'s file offset " + std::to_string(location.file_offset) +
                     " is not a multiple of " + std::to_string(kPageBytes));
  }
}

void StepPipeline::Impl::check(const StepTask& task, std::size_t hypers) const {
  if (task.key < 0) refuse(task, "the key must be at least 0");
  check(task, task.param, "param", layout_.param_in_file);
  check(task, task.grad, "grad", layout_.grad_in_file);
  check(task, task.record, "record", true);
  std::vector<StepSegment> segments = task.segments;
  std::sort(segments.begin(), segments.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  std::size_t end = 0;  // of the segments before
  for (const auto& [first, numel, hyper, index] : segments) {
    const std::string segment =
        "segment (" + std::to_string(first) + ", " + std::to_string(numel) + ") ";
    if (numel > layout_.piece_numel || first > layout_.piece_numel - numel) {
      refuse(task, segment + "is outside the piece of " + std::to_string(layout_.piece_numel) +
                       " elements");
    }
    if (first < end) refuse(task, segment + "overlaps another that ends at " + std::to_string(end));
    if (hyper >= hypers) {
      refuse(task, segment + "wants hyper-parameters " + std::to_string(hyper) + " of " +
                       std::to_string(hypers));
    }
    end = first + numel;
  }
}

void StepPipeline::Impl::submit(std::vector<StepTask> tasks, std::span<const Hyper> hypers) {
  for (const StepTask& task : tasks) check(task, hypers.size());
  auto constants = std::make_shared<std::vector<UpdateConstants>>();
  for (const Hyper& hyper : hypers) {
    hyper.validate();
    constants->push_back(make_constants(layout_.kind, hyper));
  }
  const Lock lock(mutex_);
  settle_all();
  if (closing_) throw std::runtime_error("the step pipeline is closed");
  for (StepTask& task : tasks) queued_.push_back({std::move(task), constants});
  changed_.notify_all();
}

void StepPipeline::Impl::wait_updated() {
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return failure_ != nullptr || !unfinished(kNoKey); });
  settle_all();
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

void StepPipeline::Impl::forget(std::int64_t key) {
  wait_written(key);
  const Lock lock(mutex_);
  for (Buffer& buffer : buffers_) {
    if (key != kNoKey && buffer.key != key) continue;
    if (buffer.state != BufferState::idle) continue;  // a task submitted since
    buffer.key = kNoKey;
    buffer.keeps_record = buffer.keeps_param = false;
    buffer.last_used = 0;
  }
}

StepStats StepPipeline::Impl::stats() const {
  const Lock lock(mutex_);
  return stats_;
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
  // The engine may still be using the buffers' memory.
  std::exception_ptr error;
  for (Buffer& buffer : buffers_) {
    for (const auto* transfers : {&buffer.reads, &buffer.writes}) {
      for (const OpPtr& transfer : *transfers) {
        try {
          transfer->wait();
        } catch (...) {
          if (!error) error = std::current_exception();
        }
      }
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
  changed_.notify_all();
}

// --- with the lock held ---------------------------------------------------------------------

bool StepPipeline::Impl::unfinished(std::int64_t key) const {
  const auto matches = [&](const Work& work) { return key == kNoKey || work.task.key == key; };
  return (current_ && matches(*current_)) || std::any_of(staged_.begin(), staged_.end(), matches) ||
         std::any_of(queued_.begin(), queued_.end(), matches);
}

// Whether the buffer is idle, which it becomes here if its writes are done. Throws if one failed.
bool StepPipeline::Impl::settled(Buffer& buffer) {
  if (buffer.state != BufferState::writing) return buffer.state == BufferState::idle;
  for (const OpPtr& write : buffer.writes) {
    if (!write->done()) return false;
  }
  for (const OpPtr& write : buffer.writes) write->wait();
  buffer.writes.clear();
  buffer.state = BufferState::idle;
  return true;
}

// Notices the writes that are done, so that a failed one is not overlooked. Throws the failure.
void StepPipeline::Impl::settle_all() {
  try {
    for (Buffer& buffer : buffers_) settled(buffer);
  } catch (...) {
    fail(std::current_exception());
  }
  throw_if_failed();
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

std::vector<OpPtr> StepPipeline::Impl::writes_of(std::int64_t key) const {
  std::vector<OpPtr> writes;
  for (const Buffer& buffer : buffers_) {
    if (key != kNoKey && buffer.key != key) continue;
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
    changed_.wait(lock, [&] { return stopping() || !queued_.empty(); });
    if (stopping()) return;
    // The task stays in the queue meanwhile: it is one of those that waiters wait for.
    if (needs_buffer(queued_.front().task)) {
      StepTask task = queued_.front().task;
      Buffer* buffer = acquire(lock, task.key);
      if (buffer == nullptr) return;
      const bool read_record = task.record.in_file() && !buffer->keeps_record;
      const bool read_param = task.param.in_file() && !buffer->keeps_param;
      const bool cacheable = task.record.in_file() || task.param.in_file();
      if (cacheable && !read_record && !read_param) ++stats_.hits;
      if (read_record) stats_.read_bytes += layout_.record_bytes();
      if (read_param) stats_.read_bytes += layout_.param_bytes();
      if (task.grad.in_file()) stats_.read_bytes += layout_.grad_bytes();
      lock.unlock();
      submit_reads(task, *buffer, read_record, read_param);
      lock.lock();
      if (stopping()) return;
      queued_.front().buffer = buffer;
    }
    staged_.push_back(std::move(queued_.front()));
    queued_.pop_front();
    changed_.notify_all();
  }
}

// The buffer that keeps the key's content, or one to give up; nullptr when stopping.
Buffer* StepPipeline::Impl::acquire(Lock& lock, std::int64_t key) {
  while (!stopping()) {
    const auto kept = std::find_if(buffers_.begin(), buffers_.end(),
                                   [&](const Buffer& buffer) { return buffer.key == key; });
    const bool is_kept = kept != buffers_.end();
    Buffer* const buffer = is_kept ? &*kept : find_victim();
    if (buffer == nullptr || buffer->state == BufferState::assigned) {
      // An earlier task has it. If that is one with the same key, the file is behind until then.
      changed_.wait(lock);
    } else if (is_kept || settled(*buffer)) {
      // (The updater waits for the writes of a kept buffer; reads of other parts may start now.)
      if (!is_kept) buffer->keeps_record = buffer->keeps_param = false;
      buffer->key = key;
      buffer->state = BufferState::assigned;
      buffer->reads.clear();
      return buffer;
    } else {
      const std::vector<OpPtr> writes = buffer->writes;
      lock.unlock();
      for (const OpPtr& write : writes) write->wait();
      lock.lock();
    }
  }
  return nullptr;
}

// Among the buffers that no task has, the one that no queued task wants and that was used least
// recently; else the one wanted last. One still being written is worth waiting for: what is kept
// then depends on the order of the tasks only, not on the disk's timing.
Buffer* StepPipeline::Impl::find_victim() {
  constexpr std::size_t never = std::numeric_limits<std::size_t>::max();
  const auto next_use = [&](const Buffer& buffer) {
    const auto next = std::find_if(queued_.begin(), queued_.end(),
                                   [&](const Work& work) { return work.task.key == buffer.key; });
    return next == queued_.end() ? never : static_cast<std::size_t>(next - queued_.begin());
  };
  Buffer* victim = nullptr;
  std::size_t victim_use = 0;
  for (Buffer& buffer : buffers_) {
    if (buffer.state == BufferState::assigned) continue;
    const std::size_t use = next_use(buffer);
    if (victim == nullptr || use > victim_use ||
        (use == victim_use && buffer.last_used < victim->last_used)) {
      victim = &buffer;
      victim_use = use;
    }
  }
  return victim;
}

void StepPipeline::Impl::submit_reads(const StepTask& task, Buffer& buffer, bool read_record,
                                      bool read_param) {
  const auto read = [&](const Location& from, std::size_t at, std::size_t nbytes) {
    buffer.reads.push_back(engine_->submit(IoKind::read, file_, buffer.memory + at, nbytes,
                                           static_cast<std::uint64_t>(from.file_offset)));
  };
  if (read_record) read(task.record, 0, layout_.record_bytes());
  if (read_param) read(task.param, layout_.param_at(), layout_.param_bytes());
  if (task.grad.in_file()) read(task.grad, layout_.grad_at(), layout_.grad_bytes());
}

void StepPipeline::Impl::update_tasks() {
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

    // From here to the submission of the writes nothing stops the task: half of an update in RAM
    // and the other half not in the file would be worse than none.
    lock.unlock();
    {
      const Stopwatch watch(adam_s);
      update(*current_);
    }
    if (buffer != nullptr) submit_writes(current_->task, *buffer);
    lock.lock();
    stats_.adam_s += adam_s;
    ++stats_.tasks;
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
  for (const auto& [first, numel, hyper, index] : task.segments) {
    slices.push_back(
        {advanced(whole, layout_.kind, first), numel, (*work.constants)[hyper], index});
  }
  hetero::update(layout_.kind, slices);
}

void StepPipeline::Impl::submit_writes(const StepTask& task, Buffer& buffer) {
  const auto write = [&](const Location& to, std::size_t at, std::size_t nbytes) {
    OpPtr op = engine_->submit(IoKind::write, file_, buffer.memory + at, nbytes,
                               static_cast<std::uint64_t>(to.file_offset));
    const Lock lock(mutex_);
    buffer.writes.push_back(std::move(op));
    stats_.written_bytes += nbytes;
  };
  if (task.record.in_file()) write(task.record, 0, layout_.record_bytes());
  if (task.param.in_file()) write(task.param, layout_.param_at(), layout_.param_bytes());
  const Lock lock(mutex_);
  buffer.keeps_record = task.record.in_file();
  buffer.keeps_param = task.param.in_file();
  buffer.state = buffer.writes.empty() ? BufferState::idle : BufferState::writing;
  buffer.last_used = ++clock_;
}

// --- the handle -----------------------------------------------------------------------------

StepPipeline::StepPipeline(std::shared_ptr<IoEngine> engine, int file, char* memory,
                           std::size_t memory_bytes, std::size_t buffers, const PieceLayout& layout)
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
  impl_ = std::make_unique<Impl>(std::move(engine), file, memory, buffers, layout);
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

void StepPipeline::wait_updated() { impl().wait_updated(); }

void StepPipeline::wait_written(std::int64_t key) { impl().wait_written(key); }

void StepPipeline::forget(std::int64_t key) { impl().forget(key); }

StepStats StepPipeline::stats() const { return impl().stats(); }

void StepPipeline::close() {
  if (getpid() == owner_) impl_->close();
}

}  // namespace hetero
