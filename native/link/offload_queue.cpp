#include "link/offload_queue.h"

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/quiet_thread.h"
#include "update/reductions.h"

namespace hetero {
namespace {

// CU_EVENT_BLOCKING_SYNC, so that who waits sleeps, and CU_EVENT_DISABLE_TIMING.
constexpr unsigned kEventFlags = 0x1 | 0x2;

// NOLINTNEXTLINE(performance-no-int-to-ptr): the caller has handles as numbers
void* handle(std::uintptr_t number) { return reinterpret_cast<void*>(number); }

// Brings elements from a buffer to their place.
void put(const Offload& offload, const std::byte* buffer, std::size_t first, std::size_t numel) {
  const auto write = offload.add ? &add_and_sum : &copy_and_sum;
  write(offload.from_dtype, reinterpret_cast<const char*>(buffer), offload.dtype,
        reinterpret_cast<char*>(offload.to) + first * element_bytes(offload.dtype), numel);
}

std::exception_ptr cancelled() {
  return std::make_exception_ptr(CopyError(ECANCELED, "the copy to RAM was cancelled"));
}

}  // namespace

CudaCopier::CudaCopier(const CudaDriver& driver, std::uintptr_t context, std::uintptr_t stream)
    : driver_(driver), context_(handle(context)), stream_(handle(stream)) {}

CudaCopier::~CudaCopier() {
  driver_.cuCtxSetCurrent(context_);
  for (void* const event : all_events_) driver_.cuEventDestroy_v2(event);
}

void* CudaCopier::start(std::byte* to, const std::byte* from, std::size_t nbytes,
                        std::uintptr_t event) {
  check(driver_.cuCtxSetCurrent(context_), nbytes);
  void* const end = take_event(nbytes);
  try {
    if (event != 0) check(driver_.cuStreamWaitEvent(stream_, handle(event), 0), nbytes);
    const auto source = reinterpret_cast<std::uintptr_t>(from);
    check(driver_.cuMemcpyDtoHAsync_v2(to, source, nbytes, stream_), nbytes);
    // (A stream that refuses this, after it took the copy, is one of a device that has failed: it
    // does no work any more.)
    check(driver_.cuEventRecord(end, stream_), nbytes);
  } catch (...) {
    free_events_.push_back(end);
    throw;
  }
  return end;
}

void CudaCopier::wait(void* end, std::size_t nbytes) {
  const int result = driver_.cuEventSynchronize(end);
  free_events_.push_back(end);
  check(result, nbytes);
}

void* CudaCopier::take_event(std::size_t nbytes) {
  if (free_events_.empty()) {
    all_events_.reserve(all_events_.size() + 1);
    free_events_.reserve(all_events_.size() + 1);
    void* made = nullptr;
    check(driver_.cuEventCreate(&made, kEventFlags), nbytes);
    all_events_.push_back(made);
    return made;
  }
  void* const taken = free_events_.back();
  free_events_.pop_back();
  return taken;
}

void CudaCopier::check(int result, std::size_t nbytes) const {
  if (result == 0) return;
  const char* text = nullptr;
  driver_.cuGetErrorString(result, &text);
  throw CopyError(
      EIO, "copy of " + std::to_string(nbytes) +
               " bytes from the device to RAM failed: " + (text == nullptr ? "unknown" : text) +
               " (CUDA's error " + std::to_string(result) + ")");
}

void OffloadOp::wait() {
  wait_done();
  if (error_) std::rethrow_exception(error_);
}

OffloadQueue::OffloadQueue(const CudaDriver& driver, std::uintptr_t context, std::uintptr_t stream,
                           std::byte* buffers, std::size_t count, std::size_t buffer_bytes)
    : copier_(std::in_place, driver, context, stream),
      buffers_(buffers),
      buffer_bytes_(buffer_bytes),
      ahead_(count) {
  if (buffers == nullptr || count == 0 || buffer_bytes < element_bytes(Dtype::fp32)) {
    throw std::invalid_argument(std::to_string(count) + " buffers of " +
                                std::to_string(buffer_bytes) + " bytes are none");
  }
  thread_ = quiet_thread("hetero-offload", [this] { work(); });
}

std::shared_ptr<OffloadOp> OffloadQueue::submit(const Offload& offload) {
  auto op = std::make_shared<OffloadOp>(offload);
  {
    const MutexLock lock(mutex_, fork_);
    if (stopping_) throw std::runtime_error("the gradient offload is closed");
    queue_.push_back(op);
  }
  changed_.notify_one();
  return op;
}

void OffloadQueue::cancel(OffloadOp& op) {
  const MutexLock lock(mutex_, fork_);
  op.cancelled_ = true;
}

void OffloadQueue::close() {
  if (foreign()) return;
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
    for (const auto& op : queue_) op->cancelled_ = true;
  }
  changed_.notify_one();
  const MutexLock joining(joining_);
  if (thread_.joinable()) thread_.join();
}

void OffloadQueue::work() {
  const MutexLock lock(mutex_);
  for (;;) {
    while (!queue_.empty() && count_ != ahead_.size()) start();
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

// Starts the copy of the next part. What keeps it from being started is the array's error.
void OffloadQueue::start() {
  const std::size_t place = (first_ + count_) % ahead_.size();
  Part& part = ahead_[place];
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
    if (!offload.straight()) part.buffer = buffers_ + place * buffer_bytes_;
    part.nbytes = part.numel * size;
    const MutexUnlock unlocked(mutex_);
    try {
      std::byte* const to = part.buffer != nullptr ? part.buffer : offload.to;
      part.copied =
          copier_->start(to, offload.from + part.first * size, part.nbytes, offload.event);
    } catch (...) {
      op.error_ = std::current_exception();
    }
  }
  if (part.copied != nullptr) {
    op.begun_ += part.numel;
    part.last = op.begun_ == offload.numel;
  }
  if (part.last) queue_.pop_front();
  ++count_;
}

// Until the oldest part is at its place.
void OffloadQueue::finish() {
  Part& part = ahead_[first_];
  OffloadOp& op = *part.op;
  const Offload& offload = op.offload_;
  {
    const MutexUnlock unlocked(mutex_);
    try {
      if (part.copied != nullptr) {
        copier_->wait(part.copied, part.nbytes);
        if (part.buffer != nullptr && !op.error_) put(offload, part.buffer, part.first, part.numel);
      }
    } catch (...) {
      if (!op.error_) op.error_ = std::current_exception();
    }
  }
  const std::shared_ptr<OffloadOp> ended = part.last ? std::move(part.op) : nullptr;
  part = Part();
  first_ = (first_ + 1) % ahead_.size();
  --count_;
  if (ended) ended->settle();
}

}  // namespace hetero
