// The bf16 split: an fp32 master w as a bf16 parameter and 17 bits more.
//
// The parameter p is w rounded to nearest even (the bits of torch's conversion) and `remainder` has
// the 16 low bits of w. Rounding may have added 1 to the upper half u of w: that carry = p - u goes
// to a bit that the rule's last state can spare (state_codec.inl.h). So
// w = ((p - carry) << 16) | remainder, exactly. A NaN becomes 0x7fc0 with remainder and carry 0.
//
// States in 8 bits have no bit to spare. There (Carrier::remainder) w with remainder 0x8000 has
// carry 0: of the two such w that round to p the one below p, on a tie that goes up, is moved away
// from zero by one unit in its last place. So the carry is 1 where the remainder is
// above 0x8000, and p is the rounding of w as ever.
//
// Whoever writes p alone, as user code does through `param.data`, keeps remainder and carry: w is
// then less than one bf16 step from the new p. Where no w has these three (p is 0 and the carry
// makes a NaN of it, a tie would go the other way, p is infinite and w would be a NaN), w is p
// itself: else the next split would give another p than was written.
#pragma once

#include <cstddef>

#include "update/kernels/kernels.h"
#include "update/kernels/state_codec.inl.h"
#include "update/kernels/vectors.inl.h"

namespace hetero {

template <class V, Carrier carrier>
struct SplitMaster {
  static constexpr bool in_remainder = carrier == Carrier::remainder;

  typename V::U param, remainder, carry;  // in the low bits of each lane

  static SplitMaster of(typename V::F master) {
    auto bits = V::if_nan(master, V::set_bits(0x7fc00000), V::bits(master));
    if constexpr (in_remainder) bits = (bits & 0x1ffffU) == kTieUp ? bits + 1U : bits;
    const auto upper = bits >> 16;
    const auto param = rounded(bits, upper);
    return {param, bits, param - upper};  // (storing takes the low half of `bits`)
  }

  // `carry` is not used if the remainder says it.
  static typename V::F join(typename V::U param, typename V::U remainder, typename V::U carry) {
    const auto alone = param << 16;
    const auto upper = param - carry;
    auto bits = (upper << 16) | remainder;
    auto is_rounding = rounded(bits, upper) == param;
    if constexpr (in_remainder) {
      const auto above = alone | remainder;
      bits = remainder > 0x8000U ? above - 0x10000U : above;
      is_rounding = (bits & 0x1ffffU) != kTieUp;
    }
    return V::from_bits(V::if_nan(V::from_bits(bits), alone, is_rounding ? bits : alone));
  }

 private:
  using Words = typename V::U;

  // The upper half of a number that is no NaN, rounded to nearest even. It is `upper` before that.
  static Words rounded(Words bits, Words upper) {
    if constexpr (in_remainder) return (bits + 0x7fffU) >> 16;  // no tie rounds up
    return (bits + (0x7fffU + (upper & 1U))) >> 16;
  }

  static constexpr std::uint32_t kTieUp = 0x18000;  // the 17 low bits of a tie that rounds up
};

// Bytes per element of the array that has the carry; 0 if there is none.
template <StateDtype state_dtype, Carrier carrier>
constexpr std::size_t kCarrierBytes =
    carrier == Carrier::remainder ? 0 : state_bytes(state_dtype, 1);

template <class V, StateDtype state_dtype, Carrier carrier>
void split_block(const char* source, const SplitArrays& at, std::size_t numel) {
  for_vectors<V, 4, 2, 2, kCarrierBytes<state_dtype, carrier>>(
      numel,
      [](const char* from, char* param, char* remainder, char* carried) {
        const auto split = SplitMaster<V, carrier>::of(V::load(from));
        V::store_u16(param, split.param);
        V::store_u16(remainder, split.remainder);
        if constexpr (carrier != Carrier::remainder) {
          using State = StateCodec<V, state_dtype, carrier>;
          State::store(carried, State::with_carry(State::load(carried), split.carry));
        }
      },
      source, at.param, at.remainder, at.carrier);
}

template <class V, StateDtype state_dtype, Carrier carrier>
void join_block(const SplitArrays& at, char* target, std::size_t numel) {
  for_vectors<V, 2, 2, kCarrierBytes<state_dtype, carrier>, 4>(
      numel,
      [](char* param, char* remainder, char* carried, char* to) {
        auto carry = V::set_bits(0);
        if constexpr (carrier != Carrier::remainder) {
          using State = StateCodec<V, state_dtype, carrier>;
          carry = State::carry(State::load(carried));
        }
        const auto low = V::load_u16(remainder);
        V::store(to, SplitMaster<V, carrier>::join(V::load_u16(param), low, carry));
      },
      at.param, at.remainder, at.carrier, target);
}

}  // namespace hetero
