// Copies from a GPU to RAM, by functions of CUDA's driver that the caller has found: nothing of
// CUDA is needed to build this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace hetero {

// A copy that a device refused, did not bring to its end, or that was cancelled.
struct CopyError : std::runtime_error {
  CopyError(int error, const std::string& text) : std::runtime_error(text), error(error) {}
  int error;  // errno: ECANCELED, or EIO for what the device says
};

// The driver's functions, with its names and, but for the types of handles, its prototypes. All
// return 0 or an error's number.
struct CudaDriver {
  int (*cuCtxSetCurrent)(void* context);
  int (*cuEventCreate)(void** event, unsigned flags);
  int (*cuEventDestroy_v2)(void* event);
  int (*cuEventRecord)(void* event, void* stream);
  int (*cuEventSynchronize)(void* event);
  int (*cuStreamWaitEvent)(void* stream, void* event, unsigned flags);
  int (*cuMemcpyDtoHAsync_v2)(void* to, std::uint64_t from, std::size_t nbytes, void* stream);
  int (*cuGetErrorString)(int error, const char** text);
};

// Copies in one stream of one context, which end in the order in which they were started. One
// thread uses it; it is destroyed there, when none of its copies is left.
class CudaCopier {
 public:
  CudaCopier(const CudaDriver& driver, std::uintptr_t context, std::uintptr_t stream);
  CudaCopier(const CudaCopier&) = delete;
  CudaCopier& operator=(const CudaCopier&) = delete;
  ~CudaCopier();

  // Starts copying `nbytes`, at least one, when the device's `event` has come (0: at once). Returns
  // the event of the copy's end. Throws CopyError.
  void* start(std::byte* to, const std::byte* from, std::size_t nbytes, std::uintptr_t event);
  // Blocks until the copy of `nbytes` that has this end is done. Called once for each, after which
  // the event is another one's. Throws CopyError.
  void wait(void* end, std::size_t nbytes);

 private:
  void* take_event(std::size_t nbytes);
  // Throws CopyError, for a copy of `nbytes`, if `result` is an error's number.
  void check(int result, std::size_t nbytes) const;

  const CudaDriver driver_;
  void* const context_;
  void* const stream_;
  std::vector<void*> all_events_;
  std::vector<void*> free_events_;  // whose copies have ended; it has room for all
};

}  // namespace hetero
