// Copies from a GPU to RAM, by functions of CUDA's driver that the caller has found: nothing of
// CUDA is needed to build this.
#include <cerrno>
#include <string>
#include <vector>

#include "link/copier.h"

namespace hetero {
namespace {

// CU_EVENT_BLOCKING_SYNC, so that who waits sleeps, and CU_EVENT_DISABLE_TIMING.
constexpr unsigned kEventFlags = 0x1 | 0x2;

// NOLINTNEXTLINE(performance-no-int-to-ptr): the caller has handles as numbers
void* handle(std::uintptr_t number) { return reinterpret_cast<void*>(number); }

// In one stream of one context.
class CudaCopier : public Copier {
 public:
  CudaCopier(const CudaDriver& driver, std::uintptr_t context, std::uintptr_t stream);
  ~CudaCopier() override;

  // Throws CopyError.
  std::unique_ptr<Copy> start(std::byte* to, const std::byte* from, std::size_t nbytes,
                              std::uintptr_t event) override;

 private:
  class EventCopy;

  void* take_event(std::size_t nbytes);
  // Throws CopyError, for a copy of `nbytes`, if `result` is an error's number.
  void check(int result, std::size_t nbytes) const;

  const CudaDriver driver_;
  void* const context_;
  void* const stream_;
  std::vector<void*> all_events_;
  std::vector<void*> free_events_;  // whose copies have ended; it has room for all
};

// Its end is an event, which another copy may use afterwards.
class CudaCopier::EventCopy : public Copier::Copy {
 public:
  EventCopy(CudaCopier& copier, void* event, std::size_t nbytes)
      : copier_(copier), event_(event), nbytes_(nbytes) {}
  ~EventCopy() override { copier_.free_events_.push_back(event_); }

  void wait() override { copier_.check(copier_.driver_.cuEventSynchronize(event_), nbytes_); }
  void cancel() noexcept override {}  // a device cannot be told to leave out a copy

 private:
  CudaCopier& copier_;
  void* const event_;
  const std::size_t nbytes_;
};

CudaCopier::CudaCopier(const CudaDriver& driver, std::uintptr_t context, std::uintptr_t stream)
    : driver_(driver), context_(handle(context)), stream_(handle(stream)) {}

CudaCopier::~CudaCopier() {
  driver_.cuCtxSetCurrent(context_);
  for (void* const event : all_events_) driver_.cuEventDestroy_v2(event);
}

std::unique_ptr<Copier::Copy> CudaCopier::start(std::byte* to, const std::byte* from,
                                                std::size_t nbytes, std::uintptr_t event) {
  check(driver_.cuCtxSetCurrent(context_), nbytes);
  void* const end = take_event(nbytes);
  auto copy = std::make_unique<EventCopy>(*this, end, nbytes);
  if (event != 0) check(driver_.cuStreamWaitEvent(stream_, handle(event), 0), nbytes);
  const auto source = reinterpret_cast<std::uintptr_t>(from);
  check(driver_.cuMemcpyDtoHAsync_v2(to, source, nbytes, stream_), nbytes);
  // (A stream that refuses this, after it took the copy, is one of a device that has failed: it
  // does no work any more.)
  check(driver_.cuEventRecord(end, stream_), nbytes);
  return copy;
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

}  // namespace

std::unique_ptr<Copier> make_cuda_copier(const CudaDriver& driver, std::uintptr_t context,
                                         std::uintptr_t stream) {
  return std::make_unique<CudaCopier>(driver, context, stream);
}

}  // namespace hetero
