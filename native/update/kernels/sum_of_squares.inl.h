// Sums of squares of runs of elements, written once over a vector type.
#pragma once

#include <cstddef>

#include "update/kernels/kernels.h"
#include "update/kernels/vectors.inl.h"

namespace hetero {

// One stream without stores still gains from asking ahead (measured on Zen 5: +10 % for the 2-byte
// types, which then read as fast as fp32). Asking beyond the end of the array does no harm.
inline constexpr std::size_t kNormPrefetchBytes = 4096;

// Adds the squares of kNormLanes elements to the lanes' sums. Of bf16 the sums of the even lanes
// come first and those of the odd ones second: a word of two values is then two numbers after one
// operation each, which is all the work that widening takes.
template <class V, Dtype dtype>
void add_squares(typename V::D* sums, const char* values) {
  if constexpr (dtype == Dtype::bf16) {
    constexpr std::size_t half = kNormLanes / 2;
#pragma GCC unroll 32
    for (std::size_t i = 0; i < half; i += V::lanes) {
      const auto pairs = V::bits(V::load(values + 4 * i));
      V::add_squares(sums + i / V::double_lanes, V::from_bits(pairs << 16));
      V::add_squares(sums + (half + i) / V::double_lanes, V::from_bits(pairs & 0xffff0000U));
    }
  } else {
#pragma GCC unroll 32
    for (std::size_t i = 0; i < kNormLanes; i += V::lanes) {
      V::add_squares(sums + i / V::double_lanes,
                     load_as_fp32<V, dtype>(values + i * element_bytes(dtype)));
    }
  }
}

// Lane j sums its elements in order; a fixed tree adds the lanes. Zeros that pad the end add +0.
template <class V, Dtype dtype>
double sum_of_squares_block(const char* values, std::size_t numel) {
  constexpr std::size_t size = element_bytes(dtype);
  typename V::D sums[kNormLanes / V::double_lanes] = {};
  std::size_t i = 0;
  for (; i + kNormLanes <= numel; i += kNormLanes) {
    const char* const here = values + i * size;
    for (std::size_t line = 0; line < kNormLanes * size; line += kCacheLineBytes) {
      __builtin_prefetch(here + kNormPrefetchBytes + line);
    }
    add_squares<V, dtype>(sums, here);
  }
  if (i < numel) {
    char pad[kNormLanes * sizeof(float)] = {};
    __builtin_memcpy(pad, values + i * size, (numel - i) * size);
    add_squares<V, dtype>(sums, pad);
  }
  double stored[kNormLanes], lanes[kNormLanes];
  for (std::size_t k = 0; k < kNormLanes / V::double_lanes; ++k) {
    V::store_double(stored + k * V::double_lanes, sums[k]);
  }
  for (std::size_t j = 0; j < kNormLanes; ++j) {
    lanes[j] = dtype == Dtype::bf16 ? stored[j / 2 + j % 2 * (kNormLanes / 2)] : stored[j];
  }
  for (std::size_t width = kNormLanes / 2; width > 0; width /= 2) {
    for (std::size_t j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  }
  return lanes[0];
}

}  // namespace hetero
