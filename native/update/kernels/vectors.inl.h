// Going over arrays vector by vector.
#pragma once

#include <cstddef>

#include "update/update_kind.h"

namespace hetero {

inline constexpr std::size_t kCacheLineBytes = 64;

template <class V, Dtype dtype>
typename V::F load_as_fp32(const char* p) {
  if constexpr (dtype == Dtype::fp32) {
    return V::load(p);
  } else if constexpr (dtype == Dtype::bf16) {
    return V::from_bits(V::load_u16(p) << 16);
  } else {
    return V::load_f16(p);
  }
}

// Elements of an array at the place of the last vector, or block, of `lanes` that is not whole: a
// copy of `count` of them, padded with zeros, which goes back when it is gone if the array may be
// written to.
template <class V, std::size_t lanes, std::size_t size, class Byte>
struct Pad {
  Pad(Byte* array, std::size_t count) : array(array), nbytes(count * size) {
    if constexpr (size != 0) __builtin_memcpy(bytes, array, nbytes);
  }
  Pad(const Pad&) = delete;
  ~Pad() { store(array); }

  void store(char* to) const {
    if constexpr (size != 0) __builtin_memcpy(to, bytes, nbytes);
  }
  void store(const char*) const {}

  Byte* const array;
  const std::size_t nbytes;
  char bytes[lanes * (size != 0 ? size : 1)] = {};
};

// Asks for the cache lines that a loop will come to, `ahead` elements on: five streams are more
// than the hardware prefetcher keeps up with (measured on Zen 5: +18 % for bf16 out of cache, no
// change for the other types). Asking beyond the end of an array does no harm.
template <class V, std::size_t size, std::size_t ahead = 512>
[[gnu::always_inline]] inline void prefetch(char* at) {
  if constexpr (size != 0) __builtin_prefetch(at + ahead * size, 1);
}
template <class V, std::size_t size, std::size_t ahead = 512>
[[gnu::always_inline]] inline void prefetch(const char* at) {
  __builtin_prefetch(at + ahead * size);
}

// Calls body(address in each array...) for every vector of `numel` elements of the arrays, whose
// elements have `sizes` bytes (0: there is no such array). What is left over behind the last whole
// vector goes through the same code on copies, so that it is computed exactly like the rest.
template <class V, std::size_t... sizes, class Body, class... Byte>
[[gnu::always_inline]] inline void for_vectors(std::size_t numel, Body body, Byte*... arrays) {
  std::size_t i = 0;
  for (; i + V::lanes <= numel; i += V::lanes) {
    (prefetch<V, sizes>(arrays + i * sizes), ...);
    body(arrays + i * sizes...);
  }
  if (i != numel) body(Pad<V, V::lanes, sizes, Byte>(arrays + i * sizes, numel - i).bytes...);
}

}  // namespace hetero
