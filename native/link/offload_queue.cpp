#include "link/offload_queue.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <deque>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "base/quiet_thread.h"
#include "base/thread_annotations.h"
#include "update/reductions.h"

namespace hetero {
namespace {

// Copies that have been started and not been waited for: of parts that need a buffer one for each,
// of small arrays that need none as many as keep a link busy.
constexpr std::size_t kMostAhead = 8;

}  // namespace

void OffloadOp::wait() {
  completion_.wait();
  if (error_) std::rethrow_exception(error_);
}

// The thread and what it works on.
class OffloadQueue::Line {
 public:
  Line(std::unique_ptr<Copier> copier, std::byte* buffers, std::size_t buffer_bytes)
      : copier_(std::move(copier)),
        buffers_(buffers),
        buffer_bytes_(buffer_bytes),
        thread_(quiet_thread("hetero-offload", [this] { work(); })) {}

  void submit(std::shared_ptr<OffloadOp> op) EXCLUDES(mutex_) {
    {
      const MutexLock lock(mutex_);
      if (stopping_) throw std::runtime_error("the gradient offload is closed");
      queue_.push_back(std::move(op));
    }
    changed_.notify_one();
  }

  void cancel(OffloadOp& op) EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    cancel_held(op);
  }

  void close() EXCLUDES(mutex_, joining_) {
    {
      const MutexLock lock(mutex_);
      stopping_ = true;
      for (const auto& op : queue_) cancel_held(*op);
      for (std::size_t i = 0; i < count_; ++i) cancel_held(*ahead(i).op);
    }
    changed_.notify_one();
    const MutexLock joining(joining_);
    if (thread_.joinable()) thread_.join();
  }

 private:
  // Elements [first, first + numel) of an array, on their way.
  struct Part {
    std::shared_ptr<OffloadOp> op;
    std::unique_ptr<Copier::Copy> copy;  // null if there is nothing to copy
    std::byte* buffer = nullptr;         // null if it goes to its place
    std::size_t first = 0;
    std::size_t numel = 0;
    bool last = false;
  };

  Part& ahead(std::size_t i) REQUIRES(mutex_) { return ahead_[(first_ + i) % kMostAhead]; }

  void cancel_held(OffloadOp& op) REQUIRES(mutex_) {
    op.cancelled_ = true;
    for (std::size_t i = 0; i < count_; ++i) {
      if (ahead(i).op.get() == &op && ahead(i).copy) ahead(i).copy->cancel();
    }
  }

  void work() EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    for (;;) {
      while (can_start()) start();
      if (count_ != 0) {
        finish();
      } else if (stopping_) {
        break;
      } else {
        changed_.wait(mutex_);
      }
    }
    copier_.reset();
  }

  bool can_start() REQUIRES(mutex_) {
    if (queue_.empty() || count_ == kMostAhead) return false;
    return queue_.front()->offload_.straight() || buffers_used_ < kBuffers;
  }

  // Starts the copy of the next part. What keeps it from being started is the array's error.
  void start() REQUIRES(mutex_) {
    Part& part = ahead_[(first_ + count_) % kMostAhead];
    part.op = queue_.front();
    OffloadOp& op = *part.op;
    const Offload& offload = op.offload_;
    const std::size_t size = element_bytes(offload.from_dtype);
    const std::size_t left = offload.numel - op.begun_;
    part.first = op.begun_;
    part.numel = offload.straight() ? left : std::min(left, buffer_bytes_ / size);
    part.last = true;
    if (op.cancelled_ && !op.error_) op.error_ = cancelled();
    if (op.error_) part.numel = 0;  // the rest of it does not matter
    if (part.numel != 0) {
      if (!offload.straight()) {
        part.buffer = buffers_ + next_buffer_ * buffer_bytes_;
        next_buffer_ = (next_buffer_ + 1) % kBuffers;
        ++buffers_used_;
      }
      const MutexUnlock unlocked(mutex_);
      try {
        std::byte* const to = part.buffer != nullptr ? part.buffer : offload.to;
        part.copy =
            copier_->start(to, offload.from + part.first * size, part.numel * size, offload.event);
      } catch (...) {
        op.error_ = std::current_exception();
      }
    }
    if (part.copy) {
      op.begun_ += part.numel;
      part.last = op.begun_ == offload.numel;
      if (op.cancelled_) part.copy->cancel();  // since it was started
    }
    if (part.last) queue_.pop_front();
    ++count_;
  }

  // Until the oldest part is at its place.
  void finish() REQUIRES(mutex_) {
    Part& part = ahead(0);
    OffloadOp& op = *part.op;
    {
      const MutexUnlock unlocked(mutex_);
      try {
        if (part.copy) {
          part.copy->wait();
          if (part.buffer != nullptr && !op.error_) put(part);
        }
      } catch (...) {
        if (!op.error_) op.error_ = std::current_exception();
      }
    }
    if (part.buffer != nullptr) --buffers_used_;
    const std::shared_ptr<OffloadOp> ended = part.last ? std::move(part.op) : nullptr;
    part = Part();
    first_ = (first_ + 1) % kMostAhead;
    --count_;
    if (ended) ended->completion_.settle();
  }

  static void put(const Part& part) {
    const Offload& offload = part.op->offload_;
    const auto write = offload.add ? &add_and_sum : &copy_and_sum;
    write(offload.from_dtype, reinterpret_cast<const char*>(part.buffer), offload.dtype,
          reinterpret_cast<char*>(offload.to) + part.first * element_bytes(offload.dtype),
          part.numel);
  }

  static std::exception_ptr cancelled() {
    return std::make_exception_ptr(CopyError(ECANCELED, "the copy to RAM was cancelled"));
  }

  std::unique_ptr<Copier> copier_;  // the thread's
  std::byte* const buffers_;
  const std::size_t buffer_bytes_;
  Mutex mutex_;
  Condition changed_;  // something to do, for the thread
  std::deque<std::shared_ptr<OffloadOp>> queue_ GUARDED_BY(mutex_);  // not wholly started
  // A ring of the parts that are on their way. Its entries that are in use are the thread's; others
  // only cancel their copies, with the mutex held.
  std::array<Part, kMostAhead> ahead_ GUARDED_BY(mutex_);
  std::size_t first_ GUARDED_BY(mutex_) = 0;
  std::size_t count_ GUARDED_BY(mutex_) = 0;
  std::size_t next_buffer_ GUARDED_BY(mutex_) = 0;
  std::size_t buffers_used_ GUARDED_BY(mutex_) = 0;
  bool stopping_ GUARDED_BY(mutex_) = false;
  Mutex joining_;
  std::thread thread_ GUARDED_BY(joining_);  // last: it uses the others
};

OffloadQueue::OffloadQueue(std::unique_ptr<Copier> copier, std::byte* buffers,
                           std::size_t buffer_bytes) {
  if (buffers == nullptr || buffer_bytes < element_bytes(Dtype::fp32)) {
    throw std::invalid_argument("buffers of " + std::to_string(buffer_bytes) + " bytes are none");
  }
  line_ = std::make_unique<Line>(std::move(copier), buffers, buffer_bytes);
}

OffloadQueue::~OffloadQueue() {
  close();
  // In a forked child its thread does not exist, and its lock may be held by nobody: left alone for
  // ever.
  if (fork_.foreign()) static_cast<void>(line_.release());
}

std::shared_ptr<OffloadOp> OffloadQueue::submit(const Offload& offload) {
  fork_.require_own();
  auto op = std::make_shared<OffloadOp>(offload);
  line_->submit(op);
  return op;
}

void OffloadQueue::cancel(OffloadOp& op) {
  fork_.require_own();
  if (!op.done()) line_->cancel(op);
}

void OffloadQueue::abandon(OffloadOp& op) noexcept {
  if (fork_.foreign()) return;
  try {
    cancel(op);
    op.wait();
  } catch (...) {  // Nobody wants to know how it ended.
  }
}

void OffloadQueue::close() {
  if (!fork_.foreign()) line_->close();
}

}  // namespace hetero
