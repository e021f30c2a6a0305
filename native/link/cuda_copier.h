// Copies from a GPU to RAM, by functions of CUDA's driver that the caller has found: nothing of
// CUDA is needed to build this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "link/copier.h"

namespace hetero {

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

}  // namespace hetero
