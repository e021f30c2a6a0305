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

// Memory of `bytes` per element that will be needed soon, while others are summed.
template <std::size_t bytes>
struct Ahead {
  const char* at;

  // Asks for what belongs to kNormLanes elements from the i-th on.
  [[gnu::always_inline]] void prefetch(std::size_t i) const {
    for (std::size_t line = 0; line < kNormLanes * bytes; line += kCacheLineBytes) {
      __builtin_prefetch(at + i * bytes + line);
    }
  }
};

// The sum of squares of an array that is gone through in runs. Lane j sums its elements in order; a
// fixed tree adds the lanes.
template <class V, Dtype dtype>
struct LaneSums {
  static constexpr std::size_t size = element_bytes(dtype);
  static constexpr std::size_t vectors = kNormLanes / V::double_lanes;

  // The next elements. All runs but the last have a multiple of kNormLanes; zeros that pad the end
  // add +0.
  template <std::size_t... bytes>
  [[gnu::always_inline]] void add(const char* values, std::size_t numel, Ahead<bytes>... ahead) {
    typename V::D now[vectors];  // (not through `this`, so that they stay in registers)
    for (std::size_t k = 0; k < vectors; ++k) now[k] = sums[k];
    std::size_t i = 0;
    for (; i + kNormLanes <= numel; i += kNormLanes) {
      (ahead.prefetch(i), ...);
      add_squares<V, dtype>(now, values + i * size);
    }
    if (i < numel) {
      char pad[kNormLanes * sizeof(float)] = {};
      __builtin_memcpy(pad, values + i * size, (numel - i) * size);
      add_squares<V, dtype>(now, pad);
    }
    for (std::size_t k = 0; k < vectors; ++k) sums[k] = now[k];
  }

  double total() const {
    double stored[kNormLanes], lanes[kNormLanes];
    for (std::size_t k = 0; k < vectors; ++k) {
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

  typename V::D sums[vectors] = {};
};

template <class V, Dtype dtype>
double sum_of_squares_block(const char* values, std::size_t numel) {
  LaneSums<V, dtype> sums;
  sums.add(values, numel, Ahead<element_bytes(dtype)>{values + kNormPrefetchBytes});
  return sums.total();
}

}  // namespace hetero
