#include "link/cuda_copier.h"

#include <cerrno>

namespace hetero {
namespace {

// CU_EVENT_BLOCKING_SYNC, so that who waits sleeps, and CU_EVENT_DISABLE_TIMING.
constexpr unsigned kEventFlags = 0x1 | 0x2;

// NOLINTNEXTLINE(performance-no-int-to-ptr): the caller has handles as numbers
void* handle(std::uintptr_t number) { return reinterpret_cast<void*>(number); }

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

}  // namespace hetero
