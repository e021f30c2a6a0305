// Loading any dtype as fp32, and what the ends of arrays need.
#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace hetero {

// A block's loops handle whole vectors; what is left over goes through the same code on copies in
// arrays of one vector's length, so that it is computed exactly like the rest.
inline constexpr std::size_t kPadBytes = 16 * sizeof(float);

template <class V, Dtype dtype>
typename V::F load_as_fp32(const char* p) {
  if constexpr (dtype == Dtype::fp32) {
    return V::load(p);
  } else if constexpr (dtype == Dtype::bf16) {
    return V::from_bits(V::template shift_left<16>(V::load_u16(p)));
  } else {
    return V::load_f16(p);
  }
}

}  // namespace hetero
