// The mean of several arrays, and writes of arrays that also sum the squares of what they have
// written, as sum_of_squares.inl.h defines the sum: of the values as they are kept, after rounding.
// All are written once over a vector type.
#pragma once

#include <cstddef>

#include "update/kernels/kernels.h"
#include "update/kernels/split_master.inl.h"
#include "update/kernels/sum_of_squares.inl.h"
#include "update/kernels/vectors.inl.h"

namespace hetero {

template <class V, Dtype dtype>
void store_rounded(char* target, typename V::F value) {
  if constexpr (dtype == Dtype::fp32) {
    V::store(target, value);
  } else if constexpr (dtype == Dtype::bf16) {
    V::store_u16(target, SplitMaster<V, Carrier::none>::of(value).param);
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

// Elements that are written before their squares are summed: few enough that they are read back
// from the first-level cache, so the sum costs no traffic to memory.
inline constexpr std::size_t kRunNumel = 1024;
static_assert(kRunNumel % kNormLanes == 0);

// Calls write(first, numel) for runs of the target's elements [0, numel). While a run is summed the
// next one's memory is asked for, of the target and of `sources` (measured on Zen 5: fp32 becomes 5
// to 10 % quicker, bf16 into fp32 20 %).
template <class V, Dtype dtype, class Write, std::size_t... bytes>
[[gnu::always_inline]] inline double write_and_sum(char* target, std::size_t numel, Write write,
                                                   Ahead<bytes>... sources) {
  constexpr std::size_t size = element_bytes(dtype);
  LaneSums<V, dtype> sums;
  for (std::size_t first = 0; first < numel; first += kRunNumel) {
    const std::size_t n = numel - first < kRunNumel ? numel - first : kRunNumel;
    write(first, n);
    const std::size_t next = first + kRunNumel;
    sums.add(target + first * size, n, Ahead<size>{target + next * size},
             Ahead<bytes>{sources.at + next * bytes}...);
  }
  return sums.total();
}

// Values of the target's dtype keep their bits, others are rounded.
template <class V, Dtype dtype, Dtype source_dtype>
double copy_and_sum_block(const char* source, char* target, std::size_t numel) {
  constexpr std::size_t size = element_bytes(dtype), source_size = element_bytes(source_dtype);
  const auto copy = [=](std::size_t first, std::size_t n) {
    char* const to = target + first * size;
    const char* const from = source + first * source_size;
    if constexpr (dtype == source_dtype) {
      __builtin_memcpy(to, from, n * size);
    } else {
      for_vectors<V, source_size, size>(
          n,
          [](const char* value, char* kept) __attribute__((always_inline)) {
            store_rounded<V, dtype>(kept, load_as_fp32<V, source_dtype>(value));
          },
          from, to);
    }
  };
  return write_and_sum<V, dtype>(target, numel, copy, Ahead<source_size>{source});
}

// target += source: added in fp32 and rounded once.
template <class V, Dtype dtype, Dtype source_dtype>
double add_and_sum_block(const char* source, char* target, std::size_t numel) {
  constexpr std::size_t size = element_bytes(dtype), source_size = element_bytes(source_dtype);
  const auto add = [=](std::size_t first, std::size_t n) {
    for_vectors<V, source_size, size>(
        n,
        [](const char* value, char* kept) __attribute__((always_inline)) {
          store_rounded<V, dtype>(
              kept, load_as_fp32<V, dtype>(kept) + load_as_fp32<V, source_dtype>(value));
        },
        source + first * source_size, target + first * size);
  };
  return write_and_sum<V, dtype>(target, numel, add, Ahead<source_size>{source});
}

// The memory yardstick: p += g, m += g, v += g in fp32. Four arrays are read and three written, as
// by fp32 Adam, with next to no arithmetic.
template <class V>
void stream_block(const UpdateArrays& at, std::size_t numel) {
  for_vectors<V, 4, 4, 4, 4>(
      numel,
      [](char* p, char* m, char* v, const char* grad) __attribute__((always_inline)) {
        const auto g = V::load(grad);
        for (char* const each : {p, m, v}) V::store(each, V::load(each) + g);
      },
      at.param, at.states[0], at.states[1], at.grad);
}

}  // namespace hetero
