// Random bits for stochastic rounding.
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

}  // namespace hetero
