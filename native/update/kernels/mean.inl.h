// The mean of several arrays, written once over a vector type.
#pragma once

#include <cstddef>

#include "update/kernels/kernels.h"
#include "update/kernels/split_master.inl.h"
#include "update/kernels/vectors.inl.h"

namespace hetero {

template <class V, Dtype dtype>
void store_rounded(char* target, typename V::F value) {
  if constexpr (dtype == Dtype::fp32) {
    V::store(target, value);
  } else if constexpr (dtype == Dtype::bf16) {
    V::store_u16(target, SplitMaster<V>::of(value).param);
  } else {
    V::store_f16(target, value);
  }
}

// The target's elements [first, first + numel) become the sources' mean: added in fp32, in the
// sources' order, and rounded once. The target may be one of the sources.
template <class V, Dtype dtype>
void mean_block(const char* const* sources, std::size_t count, std::size_t first, std::size_t numel,
                char* target) {
  constexpr std::size_t size = element_bytes(dtype);
  const auto divisor = static_cast<float>(count);
  const std::size_t end = first + numel;
  std::size_t i = first;
  for (; i + V::lanes <= end; i += V::lanes) {
    auto sum = load_as_fp32<V, dtype>(sources[0] + i * size);
    for (std::size_t k = 1; k < count; ++k) {
      sum += load_as_fp32<V, dtype>(sources[k] + i * size);
    }
    store_rounded<V, dtype>(target + i * size, sum / divisor);
  }
  if (i == end) return;
  const std::size_t left_bytes = (end - i) * size;
  char pad[V::lanes * 4] = {};
  __builtin_memcpy(pad, sources[0] + i * size, left_bytes);
  auto sum = load_as_fp32<V, dtype>(pad);
  for (std::size_t k = 1; k < count; ++k) {
    __builtin_memcpy(pad, sources[k] + i * size, left_bytes);
    sum += load_as_fp32<V, dtype>(pad);
  }
  store_rounded<V, dtype>(pad, sum / divisor);
  __builtin_memcpy(target + i * size, pad, left_bytes);
}

}  // namespace hetero
