// The bf16 split: an fp32 master w as a bf16 parameter and 17 bits more.
//
// The parameter p is w rounded to nearest even (the bits of torch's conversion) and `remainder` has
// the 16 low bits of w. Rounding may have added 1 to the upper half u of w: that carry = p - u goes
// to a bit that the rule's last state can spare (state_codec.inl.h). So
// w = ((p - carry) << 16) | remainder, exactly. A NaN becomes 0x7fc0 with remainder and carry 0.
#pragma once

#include <cstddef>

#include "update/kernels/kernels.h"
#include "update/kernels/load.inl.h"
#include "update/kernels/state_codec.inl.h"

namespace hetero {

template <class V>
struct SplitMaster {
  typename V::U param, remainder, carry;  // in the low bits of each lane

  static SplitMaster of(typename V::F master) {
    const auto bits = V::if_nan(master, V::set_bits(0x7fc00000), V::bits(master));
    const auto upper = V::template shift_right<16>(bits);
    const auto odd = V::bit_and(upper, V::set_bits(1));
    const auto half = V::add(V::set_bits(0x7fff), odd);
    const auto rounded = V::template shift_right<16>(V::add(bits, half));
    return {rounded, bits, V::sub(rounded, upper)};  // (storing takes the low half of `bits`)
  }

  static typename V::F join(typename V::U param, typename V::U remainder, typename V::U carry) {
    return V::from_bits(V::bit_or(V::template shift_left<16>(V::sub(param, carry)), remainder));
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
  constexpr std::size_t size = element_bytes(state_dtype);
  SplitArrays here = at;
  std::size_t left = numel;
  for (; left >= V::lanes; left -= V::lanes) {
    split_vector<V, state_dtype, carrier>(source, here);
    source += V::lanes * 4;
    here = {here.param + V::lanes * 2, here.remainder + V::lanes * 2,
            here.carrier + V::lanes * size};
  }
  if (left == 0) return;
  char source_pad[kPadBytes] = {}, pads[3][kPadBytes] = {};
  __builtin_memcpy(source_pad, source, 4 * left);
  __builtin_memcpy(pads[2], here.carrier, size * left);
  split_vector<V, state_dtype, carrier>(source_pad, {pads[0], pads[1], pads[2]});
  __builtin_memcpy(here.param, pads[0], 2 * left);
  __builtin_memcpy(here.remainder, pads[1], 2 * left);
  __builtin_memcpy(here.carrier, pads[2], size * left);
}

template <class V, Dtype state_dtype, Carrier carrier>
void join_block(const SplitArrays& at, char* target, std::size_t numel) {
  constexpr std::size_t size = element_bytes(state_dtype);
  SplitArrays here = at;
  std::size_t left = numel;
  for (; left >= V::lanes; left -= V::lanes) {
    join_vector<V, state_dtype, carrier>(here, target);
    target += V::lanes * 4;
    here = {here.param + V::lanes * 2, here.remainder + V::lanes * 2,
            here.carrier + V::lanes * size};
  }
  if (left == 0) return;
  char target_pad[kPadBytes] = {}, pads[3][kPadBytes] = {};
  __builtin_memcpy(pads[0], here.param, 2 * left);
  __builtin_memcpy(pads[1], here.remainder, 2 * left);
  __builtin_memcpy(pads[2], here.carrier, size * left);
  join_vector<V, state_dtype, carrier>({pads[0], pads[1], pads[2]}, target_pad);
  __builtin_memcpy(target, target_pad, 4 * left);
}

}  // namespace hetero
