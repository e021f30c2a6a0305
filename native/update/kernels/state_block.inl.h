// How a rule's states are kept in 8 bits: in state blocks of kStateBlockNumel elements, each
//
//     [scale, fp32 | codes, one byte for each element]
//
// A code is an 8-bit float with four exponent bits, as E4M3 of Micikevicius et al., "FP8 Formats
// for Deep Learning", 2022 (arXiv:2209.05433), whose exponents here end at 1 and not at 2^8, and
// which is multiplied by the scale of its block, the largest magnitude in it. Block-wise scales are
// those of Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021
// (arXiv:2110.02861); float codes in the place of their table those of COAT (Xi et al., 2024,
// arXiv:2410.19313) and torchao. Floats need no table: widening and rounding are shifts and sums,
// on any instruction set.
//
//     signed (m, b)         sign, 4 exponent bits, 3 fraction bits: s * c
//     never negative (v, s) 4 exponent bits, 4 fraction bits, of the square root: (s * c)^2
//
//     c = 0.fraction * 2^-14               exponent 0
//     c = 1.fraction * 2^(exponent - 15)   else; the largest code that is used is that of 1
//
// The square root (as FlashOptim's, Ortiz et al., 2026, arXiv:2602.23349) gives v the range of m,
// whose square it follows. v > 0 never becomes 0, by which an update would divide: its smallest
// code is 1, or the first whose square is a normal number.
//
// A value is rounded at random up or down, such that its expectation (that of the root) is the
// value: the changes of slow averages are a small part of a step between codes. Codes decode to
// values that are rounded to the same codes again, whatever the random bits are: the largest
// magnitude is the scale exactly; products with the inverse scale end a little above the code's
// value (kAbove), and at most 12 units in the last place, where random bits begin above 15
// (kRandomStep).
//
// A block has no other scale than
//
//     0      if its largest magnitude is below 2^-109, so that no product with a code is subnormal;
//            a root's below 2^-63, so that no scale's square is; its codes are 0 then
//     NaN    if one of it is 2^126 or more, infinite, or a NaN; its codes are 0 then
#pragma once

#include <cstddef>
#include <cstdint>

#include "update/kernels/kernels.h"
#include "update/kernels/vectors.inl.h"

namespace hetero {

template <class V, bool is_signed>
struct StateBlock {
  using F = typename V::F;
  using U = typename V::U;

  static constexpr int fraction_bits = is_signed ? 3 : 4;
  static constexpr int dropped = 23 - fraction_bits;
  static constexpr std::uint32_t first_normal = 1U << fraction_bits;
  static constexpr std::uint32_t one = 15U << fraction_bits;
  // What the upper bits of a float have more than its code, from 2^-14 on.
  static constexpr std::uint32_t normal_offset = (127U - 15U) << fraction_bits;
  // Below, of that float plus 2^-14.
  static constexpr std::uint32_t subnormal_offset = normal_offset + first_normal;
  static constexpr float smallest_normal = 0x1p-14F;

  static constexpr std::uint32_t smallest_scale = (127U - (is_signed ? 109U : 63U))
                                                  << 23;                // 2^-109 or 2^-63, in bits
  static constexpr std::uint32_t infinite_scale = (127U + 126U) << 23;  // 2^126
  static constexpr float kAbove = 1.0F + 0x1p-21F;
  static constexpr std::uint32_t kRandomStep = 16;
  static constexpr std::uint32_t random_mask = (1U << dropped) - kRandomStep;
  static constexpr std::uint32_t to_nearest = 1U << (dropped - 1);

  // What all elements of a block are rounded with.
  struct Scale {
    float scale, inverse;
    std::uint32_t keep;      // all bits, or none if the codes are 0
    std::uint32_t smallest;  // code of what is more than 0

    // From the bits of the largest magnitude.
    static Scale of(std::uint32_t largest) {
      if (largest >= infinite_scale) return {as_float(0x7fc00000), 0.0F, 0, 0};
      if (largest < smallest_scale) return {0.0F, 0.0F, 0, 0};
      const float scale = as_float(largest);
      return {scale, 1.0F / scale * kAbove, ~std::uint32_t{0}, smallest_code(scale)};
    }

    // The first code of a root whose square is a normal number.
    static std::uint32_t smallest_code(float scale) {
      if (is_signed) return 0;
      if (scale >= 0x1p-45F) return 1;
      const float root = 0x1p-63F / scale * kAbove;
      const bool subnormal = root < smallest_normal;
      const std::uint32_t bits = as_bits(subnormal ? root + smallest_normal : root);
      const std::uint32_t code = ((bits + ((1U << dropped) - 1)) >> dropped) -
                                 (subnormal ? subnormal_offset : normal_offset);
      return code < one ? code : one;
    }
  };

  static float as_float(std::uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
  }
  static std::uint32_t as_bits(float value) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
  }

  static F decode(U code, float scale) {
    const U magnitude = is_signed ? code & 0x7fU : code;
    const U offset =
        magnitude < first_normal ? V::set_bits(subnormal_offset) : V::set_bits(normal_offset);
    const F shift = magnitude < first_normal ? V::set(smallest_normal) : V::set(0.0F);
    const F product = (V::from_bits((magnitude + offset) << dropped) - shift) * scale;
    if constexpr (is_signed) return V::from_bits(V::bits(product) | ((code & 0x80U) << 24));
    return product * product;
  }

  // The number of which the magnitude is rounded: the state, or its root.
  static F kept(F x) {
    if constexpr (is_signed) return x;
    return V::sqrt(V::from_bits(V::if_normal(x, V::bits(x))));
  }

  static U magnitude(F kept) { return V::bits(kept) & 0x7fffffffU; }

  // `random` is a multiple of kRandomStep below 1 << dropped, or to_nearest.
  static U encode(F kept, const Scale& by, U random) {
    const F ratio = V::from_bits(magnitude(kept)) * by.inverse;
    const F most = ratio < 1.0F ? ratio : V::set(1.0F);  // also of a NaN
    const F shifted = most < smallest_normal ? most + smallest_normal : most;
    const U offset =
        most < smallest_normal ? V::set_bits(subnormal_offset) : V::set_bits(normal_offset);
    U code = ((V::bits(shifted) + random) >> dropped) - offset;
    if constexpr (is_signed) {
      const U with_sign = code | ((V::bits(kept) >> 24) & 0x80U);
      code = code != 0U ? with_sign : code;  // zero is +0
    } else {
      const U above_zero = code < by.smallest ? V::set_bits(by.smallest) : code;
      code = kept > 0.0F ? above_zero : code;
    }
    return code & by.keep;
  }
};

// Calls body(codes or values of one whole state block, its arrays...) for every block; the last one
// may be a copy. `value_bytes` is the size of the other array's elements.
template <class V, std::size_t value_bytes, class Body, class Value, class Block>
[[gnu::always_inline]] inline void for_state_blocks(std::size_t numel, Body body, Value* values,
                                                    Block* blocks) {
  std::size_t i = 0;
  for (; i + kStateBlockNumel <= numel; i += kStateBlockNumel) {
    body(values + i * value_bytes, blocks + i / kStateBlockNumel * kStateBlockBytes);
  }
  if (i == numel) return;
  const std::size_t rest = numel - i;
  Pad<V, kStateBlockNumel, value_bytes, Value> value(values + i * value_bytes, rest);
  Pad<V, kStateBlockBytes, 1, Block> block(blocks + i / kStateBlockNumel * kStateBlockBytes,
                                           sizeof(float) + rest);
  body(value.bytes, block.bytes);
}

template <class V, bool is_signed>
void encode_blocks(const char* source, char* blocks, std::size_t numel) {
  using Block = StateBlock<V, is_signed>;
  for_state_blocks<V, sizeof(float)>(
      numel,
      [](const char* values, char* block) {
        auto largest = V::set_bits(0);
        for (std::size_t j = 0; j < kStateBlockNumel; j += V::lanes) {
          const auto magnitude = Block::magnitude(Block::kept(V::load(values + 4 * j)));
          largest = magnitude > largest ? magnitude : largest;
        }
        const auto by = Block::Scale::of(V::largest(largest));
        __builtin_memcpy(block, &by.scale, sizeof by.scale);
        for (std::size_t j = 0; j < kStateBlockNumel; j += V::lanes) {
          const auto kept = Block::kept(V::load(values + 4 * j));
          V::store_u8(block + sizeof(float) + j,
                      Block::encode(kept, by, V::set_bits(Block::to_nearest)));
        }
      },
      source, blocks);
}

template <class V, bool is_signed>
void decode_blocks(const char* blocks, char* target, std::size_t numel) {
  using Block = StateBlock<V, is_signed>;
  for_state_blocks<V, sizeof(float)>(
      numel,
      [](char* values, const char* block) {
        float scale;
        __builtin_memcpy(&scale, block, sizeof scale);
        for (std::size_t j = 0; j < kStateBlockNumel; j += V::lanes) {
          V::store(values + 4 * j, Block::decode(V::load_u8(block + sizeof(float) + j), scale));
        }
      },
      target, blocks);
}

}  // namespace hetero
