// How a rule's states are kept in 8 bits: in state blocks of kStateBlockNumel elements, each
//
//     [scale, fp32 | codes, one byte for each element]
//
// A code is an 8-bit float with four exponent bits, as E4M3 of Micikevicius et al., "FP8 Formats
// for Deep Learning", 2022 (arXiv:2209.05433), that is multiplied by the scale of its block, the
// largest magnitude in it. Its values end at 1, so that it is the upper part of a half-precision
// number, without the highest bit of the exponent. Block-wise scales are those of Dettmers et al.,
// "8-bit Optimizers via Block-wise Quantization", 2021 (arXiv:2110.02861); floats in the place of
// their table are those of COAT (Xi et al., 2024, arXiv:2410.19313) and torchao: widening is a
// processor's own, and rounding is shifts and sums.
//
//     signed (m, b)         sign, 4 exponent bits, 3 fraction bits: s * c
//     never negative (v, s) 4 exponent bits, 4 fraction bits, of the square root: (s * c)^2
//
//     c = 0.fraction * 2^-14               exponent 0
//     c = 1.fraction * 2^(exponent - 15)   else; the largest code of a number is that of 1
//
// The square root (as FlashOptim's, Ortiz et al., 2026, arXiv:2602.23349) gives v the range of m,
// whose square it follows. v > 0 never becomes 0, by which an update would divide: its smallest
// code is 1, or the first whose square is a normal number. Zero is +0.
//
// A value is rounded at random up or down, such that its expectation (that of the root) is the
// value: the changes of slow averages are a small part of a step between codes. Codes decode to
// values that are rounded to the same codes again, whatever the random bits are: the largest
// magnitude is the scale exactly; products with the inverse scale end a little above the code's
// value (kAbove), and at most 12 units in the last place, where random bits begin at 16
// (kRandomStep).
//
// A scale is 0 where the largest magnitude is below 2^-109, so that no product with a code is
// subnormal; a root's below 2^-63, so that no scale's square is. What is no number is rare: then
// the scale, of the numbers in the block, has a minus sign, the last code of all is a NaN, and the
// one before it an infinity, which is also what 2^126 and more become.
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

  static constexpr std::size_t vectors = kStateBlockNumel / V::lanes;
  static constexpr std::size_t codes_at = sizeof(float);
  static constexpr int fraction_bits = is_signed ? 3 : 4;
  static constexpr int dropped = 23 - fraction_bits;
  static constexpr std::uint32_t first_normal = 1U << fraction_bits;
  static constexpr std::uint32_t one = 15U << fraction_bits;
  // What the upper bits of a float have more than its code, from 2^-14 on.
  static constexpr std::uint32_t normal_offset = (127U - 15U) << fraction_bits;
  // Below, of that float plus 2^-14.
  static constexpr std::uint32_t subnormal_offset = normal_offset + first_normal;
  static constexpr float smallest_normal = 0x1p-14F;

  static constexpr std::uint32_t smallest_scale = (127U - (is_signed ? 109U : 63U)) << 23;
  static constexpr std::uint32_t infinite = (127U + 126U) << 23;  // 2^126, in bits
  static constexpr std::uint32_t nan_code = is_signed ? 0x7f : 0xff;
  static constexpr float kAbove = 1.0F + 0x1p-21F;
  static constexpr std::uint32_t kRandomStep = 16;
  static constexpr std::uint32_t random_mask = (1U << dropped) - kRandomStep;
  static constexpr std::uint32_t to_nearest = 1U << (dropped - 1);

  // A block's scale, as codes are decoded with it.
  struct Scale {
    float value;
    bool has_others;  // than numbers

    static Scale load(const char* block) {
      std::uint32_t bits;
      __builtin_memcpy(&bits, block, sizeof bits);
      return {as_float(bits & 0x7fffffff), bits >> 31 != 0};
    }
  };

  // A block's scale, as codes are made with it.
  struct Rounding {
    float inverse;
    std::uint32_t smallest;  // code of what is more than 0
    bool has_others;
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

  // Stores the scale of a block of which `kept` is a vector each.
  [[gnu::always_inline]] static Rounding store_scale(char* block, const F* kept) {
    U most = magnitude(kept[0]);
#pragma GCC unroll 4
    for (std::size_t j = 1; j < vectors; ++j) {
      const U bits = magnitude(kept[j]);
      most = bits > most ? bits : most;
    }
    std::uint32_t largest = V::largest(most);
    const bool has_others = largest >= infinite;
    if (has_others) [[unlikely]] {
      largest = 0;
      for (std::size_t j = 0; j < vectors; ++j) {
        const U bits = magnitude(kept[j]);
        const std::uint32_t number = V::largest(bits < infinite ? bits : V::set_bits(0));
        largest = number > largest ? number : largest;
      }
    }
    return store_scale(block, largest, has_others);
  }

  // Of a block whose largest number has that magnitude.
  [[gnu::always_inline]] static Rounding store_scale(char* block, std::uint32_t largest,
                                                     bool has_others) {
    const bool is_zero = largest < smallest_scale;
    const std::uint32_t bits = (is_zero ? 0 : largest) | (has_others ? 0x80000000 : 0);
    __builtin_memcpy(block, &bits, sizeof bits);
    const float scale = as_float(largest);
    if (is_zero) return {0.0F, 0, has_others};
    return {1.0F / scale * kAbove, smallest_code(scale), has_others};
  }

  // The values of V::lanes codes.
  [[gnu::always_inline]] static F decode(const char* codes, const Scale& scale) {
    F value = V::template load_f8<is_signed>(codes) * scale.value;
    if (scale.has_others) [[unlikely]] {
      const U code = V::load_u8(codes);
      const U sign = is_signed ? (code & 0x80U) << 24 : V::set_bits(0);
      const U magnitude = is_signed ? code & 0x7fU : code;
      U bits = magnitude == nan_code - 1 ? sign | 0x7f800000U : V::bits(value);
      bits = magnitude == nan_code ? V::set_bits(0x7fc00000) : bits;
      value = V::from_bits(bits);
    }
    if constexpr (is_signed) return value;
    return value * value;
  }

  // The number of which the magnitude is rounded: the state, or its root.
  static F kept(F x) {
    if constexpr (is_signed) return x;
    // (After the root, which an update has taken already.)
    return V::from_bits(V::if_normal(x, V::bits(V::sqrt(x))));
  }

  static U magnitude(F kept) { return is_signed ? V::bits(kept) & 0x7fffffffU : V::bits(kept); }

  // Stores the codes of a vector. `random` is a multiple of kRandomStep below 1 << dropped, or
  // to_nearest.
  [[gnu::always_inline]] static void encode(char* codes, F kept, const Rounding& by, U random) {
    const F ratio = V::from_bits(magnitude(kept)) * by.inverse;
    const F shifted = ratio < smallest_normal ? ratio + smallest_normal : ratio;
    U code = ((V::bits(shifted) + random) >> dropped) - normal_offset;
    code = ratio < smallest_normal ? code - first_normal : code;
    if constexpr (is_signed) {
      const U with_sign = code | ((V::bits(kept) >> 24) & 0x80U);
      code = code != 0U ? with_sign : code;
    } else {
      const U bits = V::bits(kept);
      const U least = bits > by.smallest ? V::set_bits(by.smallest) : bits;  // 0 of 0
      code = code > least ? code : least;
    }
    if (by.has_others) [[unlikely]] {
      const U bits = magnitude(kept);
      const U sign = is_signed ? (V::bits(kept) >> 24) & 0x80U : V::set_bits(0);
      code = bits >= infinite ? (nan_code - 1) | sign : code;
      code = bits > 0x7f800000U ? V::set_bits(nan_code) : code;
    }
    V::store_u8(codes, code);
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
        typename V::F kept[Block::vectors];
        for (std::size_t j = 0; j < Block::vectors; ++j) {
          kept[j] = Block::kept(V::load(values + 4 * j * V::lanes));
        }
        const auto by = Block::store_scale(block, kept);
        for (std::size_t j = 0; j < Block::vectors; ++j) {
          Block::encode(block + Block::codes_at + j * V::lanes, kept[j], by,
                        V::set_bits(Block::to_nearest));
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
        const auto scale = Block::Scale::load(block);
        for (std::size_t i = 0; i < kStateBlockNumel; i += V::lanes) {
          V::store(values + 4 * i, Block::decode(block + Block::codes_at + i, scale));
        }
      },
      target, blocks);
}

}  // namespace hetero
