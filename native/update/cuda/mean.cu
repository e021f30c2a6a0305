// The mean of what ranks have sent, on a GPU: mean_block() of writes.inl.h, one lane of plain C++
// for each element, so with the CPU's bits. Compiled as update.cu is.
#pragma once

#include <cstddef>
#include <cstdint>

// Not every compiler of device code knows these, and here they are of no use.
#define __builtin_prefetch(...) static_cast<void>(0)
#define __builtin_memcpy std::memcpy
#include <cstring>

#include "update/isa/vec_scalar.h"
#include "update/kernels/writes.inl.h"
#undef __builtin_prefetch
#undef __builtin_memcpy

namespace hetero::cuda {

inline constexpr unsigned kMeanThreads = 256;  // of a block of threads

// `count` arrays of `numel` elements, one after another in memory. The target may be one of them.
struct Parts {
  const char* first;
  char* target;
  std::uint64_t numel;
  std::uint32_t count;
  std::uint32_t dtype;    // its number
  std::uint32_t divisor;  // of their sum
  std::uint32_t unused;
};
static_assert(sizeof(Parts) == 40);

template <Dtype dtype>
void mean_of(const Parts& parts, std::uint64_t i) {
  constexpr std::size_t size = element_bytes(dtype);
  const char* at = parts.first + i * size;
  float sum = load_as_fp32<VecScalar, dtype>(at);
  for (std::uint32_t k = 1; k < parts.count; ++k) {
    sum += load_as_fp32<VecScalar, dtype>(at + k * parts.numel * size);
  }
  store_rounded<VecScalar, dtype>(parts.target + i * size, sum / static_cast<float>(parts.divisor));
}

inline void mean_thread(const Parts& parts, unsigned block, unsigned thread) {
  const std::uint64_t i = static_cast<std::uint64_t>(block) * kMeanThreads + thread;
  if (i >= parts.numel) return;
  switch (static_cast<Dtype>(parts.dtype)) {
    case Dtype::fp32:
      mean_of<Dtype::fp32>(parts, i);
      break;
    case Dtype::bf16:
      mean_of<Dtype::bf16>(parts, i);
      break;
    case Dtype::fp16:
      mean_of<Dtype::fp16>(parts, i);
      break;
  }
}

}  // namespace hetero::cuda

#ifdef HETERO_NVRTC

extern "C" __global__ void hetero_mean(const __grid_constant__ hetero::cuda::Parts parts) {
  hetero::cuda::mean_thread(parts, blockIdx.x, threadIdx.x);
}

#endif
