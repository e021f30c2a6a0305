// The bf16 split: an fp32 master w as a bf16 parameter and 17 bits more.
//
// The parameter p is w rounded to nearest even (the bits of torch's conversion) and `remainder` has
// the 16 low bits of w. Rounding may have added 1 to the upper half u of w: that carry = p - u goes
// to a bit that the rule's last state can spare (state_codec.inl.h). So
// w = ((p - carry) << 16) | remainder, exactly. A NaN becomes 0x7fc0 with remainder and carry 0.
//
// Whoever writes p alone, as user code does through `param.data`, keeps remainder and carry: w is
// then less than one bf16 step from the new p. No w has p = 0 and a carry, so there the carry is
// left out; p - carry would be a NaN.
#pragma once

#include <cstddef>

#include "update/kernels/kernels.h"
#include "update/kernels/state_codec.inl.h"
#include "update/kernels/vectors.inl.h"

namespace hetero {

template <class V>
struct SplitMaster {
  typename V::U param, remainder, carry;  // in the low bits of each lane

  static SplitMaster of(typename V::F master) {
    const auto bits = V::if_nan(master, V::set_bits(0x7fc00000), V::bits(master));
    const auto upper = bits >> 16;
    const auto rounded = (bits + (0x7fffU + (upper & 1U))) >> 16;
    return {rounded, bits, rounded - upper};  // (storing takes the low half of `bits`)
  }

  static typename V::F join(typename V::U param, typename V::U remainder, typename V::U carry) {
    const auto not_zero = (0x7fffU + (param & 0x7fffU)) >> 15;
    return V::from_bits(((param - (carry & not_zero)) << 16) | remainder);
  }
};

template <class V, Dtype state_dtype, Carrier carrier>
void split_vector(const char* source, const SplitArrays& at) {
  using State = StateCodec<V, state_dtype, carrier>;
  const auto split = SplitMaster<V>::of(V::load(source));
  V::store_u16(at.param, split.param);
  V::store_u16(at.remainder, split.remainder);
  State::store(at.carrier, State::with_carry(State::load(at.carrier), split.carry));
}

template <class V, Dtype state_dtype, Carrier carrier>
void join_vector(const SplitArrays& at, char* target) {
  using State = StateCodec<V, state_dtype, carrier>;
  const auto carry = State::carry(State::load(at.carrier));
  V::store(target, SplitMaster<V>::join(V::load_u16(at.param), V::load_u16(at.remainder), carry));
}

template <class V, Dtype state_dtype, Carrier carrier>
void split_block(const char* source, const SplitArrays& at, std::size_t numel) {
  for_vectors<V, 4, 2, 2, element_bytes(state_dtype)>(
      numel,
      [](const char* from, char* param, char* remainder, char* carried) {
        split_vector<V, state_dtype, carrier>(from, {param, remainder, carried});
      },
      source, at.param, at.remainder, at.carrier);
}

template <class V, Dtype state_dtype, Carrier carrier>
void join_block(const SplitArrays& at, char* target, std::size_t numel) {
  for_vectors<V, 2, 2, element_bytes(state_dtype), 4>(
      numel,
      [](char* param, char* remainder, char* carried, char* to) {
        join_vector<V, state_dtype, carrier>({param, remainder, carried}, to);
      },
      at.param, at.remainder, at.carrier, target);
}

}  // namespace hetero
