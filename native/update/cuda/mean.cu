// The mean of what ranks have sent, on a GPU: mean_block() of writes.inl.h, one lane of plain C++
// for each element, so with the CPU's bits. Compiled as update.cu is.
#pragma once

#include <cstddef>
#include <cstdint>

// Not every compiler of device code knows these, and here they are of no use.
#define __builtin_prefetch(...) static_cast<void>(0)
#define __builtin_memcpy std::memcpy
#include <cstring>

#include "update/cuda/group.h"
#include "update/isa/vec_scalar.h"
#include "update/kernels/writes.inl.h"
#undef __builtin_prefetch
#undef __builtin_memcpy

namespace hetero::cuda {

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
void mean_of(const Parts& parts, const Share& share) {
  constexpr std::size_t size = element_bytes(dtype);
  using Values = Group<size>;
  const std::uint64_t stride = parts.numel * size;
  // Each array begins so, then.
  const bool whole = parts.numel % kGroup == 0 && Values::is_aligned(parts.first) &&
                     Values::is_aligned(parts.target);
  const char* const at = parts.first + share.first * size;
  Values values;
  values.load(at, whole, share.count);
  float sums[kGroup];
#pragma unroll
  for (unsigned i = 0; i < kGroup; ++i) sums[i] = load_as_fp32<VecScalar, dtype>(values.at(i));
  for (std::uint32_t k = 1; k < parts.count; ++k) {
    values.load(at + k * stride, whole, share.count);
#pragma unroll
    for (unsigned i = 0; i < kGroup; ++i) sums[i] += load_as_fp32<VecScalar, dtype>(values.at(i));
  }
#pragma unroll
  for (unsigned i = 0; i < kGroup; ++i) {
    store_rounded<VecScalar, dtype>(values.at(i), sums[i] / static_cast<float>(parts.divisor));
  }
  values.store(parts.target + share.first * size, whole, share.count);
}

inline void mean_thread(const Parts& parts, unsigned block, unsigned thread) {
  const Share share(parts.numel, block, thread);
  if (share.count == 0) return;
  switch (static_cast<Dtype>(parts.dtype)) {
    case Dtype::fp32:
      mean_of<Dtype::fp32>(parts, share);
      break;
    case Dtype::bf16:
      mean_of<Dtype::bf16>(parts, share);
      break;
    case Dtype::fp16:
      mean_of<Dtype::fp16>(parts, share);
      break;
  }
}

}  // namespace hetero::cuda

#ifdef HETERO_NVRTC

extern "C" __global__ void hetero_mean(const __grid_constant__ hetero::cuda::Parts parts) {
  hetero::cuda::mean_thread(parts, blockIdx.x, threadIdx.x);
}

#endif
