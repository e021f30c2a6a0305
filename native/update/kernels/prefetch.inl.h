// Software prefetch for loops over several streams.
#pragma once

#include <cstddef>

#include "update/kernels/kernels.h"

namespace hetero {

// How far ahead, in elements: five streams are more than the hardware prefetcher keeps up with
// (measured on Zen 5: +18 % for bf16 out of cache, no change for the other types).
inline constexpr std::size_t kPrefetchAhead = 512;

// Asks for the cache lines of the elements that are to come. Asking beyond the end of an array does
// no harm.
template <UpdateKind kind>
[[gnu::always_inline]] constexpr void prefetch(const UpdateArrays& at) {
  __builtin_prefetch(at.param + kPrefetchAhead * element_bytes(kind.dtype), 1);
  __builtin_prefetch(at.grad + kPrefetchAhead * element_bytes(kind.grad_dtype));
  if constexpr (master_bytes(kind.dtype) != 0) {
    __builtin_prefetch(at.master + kPrefetchAhead * master_bytes(kind.dtype), 1);
  }
  for (std::size_t i = 0; i < kind.states(); ++i) {
    __builtin_prefetch(at.states[i] + kPrefetchAhead * element_bytes(kind.state_dtype), 1);
  }
}

}  // namespace hetero
