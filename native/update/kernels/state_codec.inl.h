// How a rule's states are kept element by element: in fp32, or rounded to bf16 (state_block.inl.h
// has the third way); with the carry of the bf16 split in a
// spare bit, or without.
//
// What is no normal number is kept as +0 (update_rules.inl.h).
//
// Everything is done on fp32 bits, of which a bf16 array keeps the upper half. The carry is
//
//     Carrier::sign     the sign bit of a state that is never negative
//     Carrier::lowest   the lowest bit that is kept: an fp32 state is cut off before it, a bf16
//                       state is rounded one bit sooner
//
// Rounding to bf16 is stochastic: the magnitude goes up with the probability of its dropped bits,
// so its expectation is the value. `bits + random` and dropping the low bits does that:
//
//     * an infinity stays one, because its low bits are 0;
//     * a finite value beyond the largest bf16 may become infinite, as if 2^128 were the next one;
//     * a NaN becomes 0x7fc0 (the sum might wrap around).
#pragma once

#include <cstdint>

#include "update/kernels/kernels.h"

namespace hetero {

// 32 random bits for each element, from its number and the update's key alone: so they depend
// neither on threads nor on how an array is cut. Numbers count modulo 2^32: elements that far apart
// round with the same bits, which does no harm, because they round different values.
//
// The mixer is the 32-bit one with the least bias that Wellons' hash prospector lists
// (github.com/skeeto/hash-prospector, [16 21f0aaad 15 d35a2d97 15]).
template <class V>
class RandomBits {
 public:
  using U = typename V::U;

  RandomBits(std::uint64_t index, std::uint32_t key)
      : counter_(static_cast<std::uint32_t>(index) + V::iota()), key_(V::set_bits(key)) {}

  U next() {
    U x = counter_ ^ key_;
    counter_ += std::uint32_t{V::lanes};
    x ^= x >> 16;
    x *= 0x21f0aaadU;
    x ^= x >> 15;
    x *= 0xd35a2d97U;
    return x ^ (x >> 15);
  }

 private:
  U counter_, key_;
};

template <class V, StateDtype dtype, Carrier carrier>
struct StateCodec {
  using F = typename V::F;
  using U = typename V::U;

  static constexpr int dropped =
      (dtype == StateDtype::bf16 ? 16 : 0) + (carrier == Carrier::lowest ? 1 : 0);
  static constexpr int carry_bit = carrier == Carrier::lowest ? dropped - 1 : 31;
  static constexpr std::uint32_t carry_mask = std::uint32_t{1} << carry_bit;

  static U load(const char* p) {
    if constexpr (dtype == StateDtype::bf16) return V::load_u16(p) << 16;
    return V::bits(V::load(p));
  }

  static void store(char* p, U bits) {
    if constexpr (dtype == StateDtype::bf16) {
      V::store_u16(p, bits >> 16);
    } else {
      V::store(p, V::from_bits(bits));
    }
  }

  static U carry(U bits) {
    if constexpr (carry_bit == 31) return bits >> carry_bit;
    return (bits >> carry_bit) & 1U;
  }

  // The number, without the carry.
  static F value(U bits) {
    if constexpr (carrier == Carrier::none) return V::from_bits(bits);
    return V::from_bits(bits & ~carry_mask);
  }

  // Bits to store, but for the carry: 0 for what is no normal number. `random` is used from bit 0
  // on.
  static U round(F x, U random) {
    if constexpr (dtype != StateDtype::bf16) return V::if_normal(x, V::bits(x));
    constexpr std::uint32_t low = (std::uint32_t{1} << dropped) - 1;
    const U kept = V::if_normal(x, (V::bits(x) + (random & low)) & ~low);
    return V::if_nan(x, V::set_bits(0x7fc00000), kept);
  }

  static U with_carry(U bits, U carry) {
    if constexpr (carrier == Carrier::none) return bits;
    if constexpr (carrier == Carrier::lowest) {
      // A NaN that has no other bit would become an infinity.
      bits = V::if_nan(V::from_bits(bits), bits | 0x00400000U, bits);
    }
    return (bits & ~carry_mask) | (carry << carry_bit);
  }
};

}  // namespace hetero
