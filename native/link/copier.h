// Copies from a device to RAM that go on in the background, whatever the device is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace hetero {

// A copy that a device refused, or did not bring to its end.
struct CopyError : std::runtime_error {
  CopyError(int error, const std::string& text) : std::runtime_error(text), error(error) {}
  int error;  // errno: ECANCELED, or EIO for what the device says
};

// One thread uses it; it is destroyed there, when none of its copies is left.
class Copier {
 public:
  // A copy under way.
  class Copy {
   public:
    Copy() = default;
    Copy(const Copy&) = delete;
    Copy& operator=(const Copy&) = delete;
    virtual ~Copy() = default;

    // Blocks until the bytes are there. Throws if the copy failed. Called once, in any case.
    virtual void wait() = 0;
    // The bytes are not needed: wait() may end early. From any thread.
    virtual void cancel() noexcept = 0;
  };

  Copier() = default;
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;
  virtual ~Copier() = default;

  // Starts copying `nbytes`, at least one, when the device's `event` has come (0: at once). Copies
  // end in the order in which they were started. Throws what keeps it from being started.
  virtual std::unique_ptr<Copy> start(std::byte* to, const std::byte* from, std::size_t nbytes,
                                      std::uintptr_t event) = 0;
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

// From a GPU, in one stream of one context. Nothing of CUDA is needed to build it.
std::unique_ptr<Copier> make_cuda_copier(const CudaDriver& driver, std::uintptr_t context,
                                         std::uintptr_t stream);

}  // namespace hetero
