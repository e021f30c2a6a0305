// One lane of plain C++: the truth that the vector types are compared with.
#pragma once

#include <cmath>
#include <cstdint>

#include "update/isa/vec_operators.h"

namespace hetero {

struct VecScalar : VecOperators<float, std::uint32_t, double> {
  static U iota() { return 0; }
  static U load_u16(const char* p) { return get<std::uint16_t>(p); }
  static void store_u16(char* p, U x) { put(p, static_cast<std::uint16_t>(x)); }
  static U load_u8(const char* p) { return get<std::uint8_t>(p); }
  static void store_u8(char* p, U x) { put(p, static_cast<std::uint8_t>(x)); }
  static std::uint32_t largest(U x) { return x; }
  static F sqrt(F x) { return std::sqrt(x); }
  static F fma(F a, F b, F c) { return std::fma(a, b, c); }

  static F load_f16(const char* p) {
    const U half = get<std::uint16_t>(p);
    const U sign = (half & 0x8000) << 16;
    const U exponent = (half >> 10) & 0x1f;
    const U fraction = half & 0x3ff;
    U magnitude;
    if (exponent == 0) {
      magnitude = bits(static_cast<float>(fraction) * 0x1p-24F);
    } else if (exponent < 31) {
      magnitude = ((exponent + (127 - 15)) << 23) | (fraction << 13);
    } else {
      magnitude = 0x7f800000 | (fraction << 13) | (fraction != 0 ? 0x400000 : 0);  // NaNs go quiet
    }
    return from_bits(sign | magnitude);
  }

  template <bool is_signed>
  static F load_f8(const char* p) {
    const U code = load_u8(p);
    char half[2];
    store_u16(half, is_signed ? ((code & 0x80) << 8) | ((code & 0x7f) << 7) : code << 6);
    return load_f16(half);
  }

  static void store_f16(char* p, F x) {
    const U sign = (bits(x) >> 16) & 0x8000;
    const U magnitude = bits(x) & 0x7fffffff;
    U half;
    if (magnitude > 0x7f800000) {
      half = 0x7e00 | ((magnitude >> 13) & 0x3ff);
    } else if (magnitude >= 0x477ff000) {  // 65520: halfway to what would follow the largest
      half = 0x7c00;
    } else if (magnitude < 0x38800000) {
      // A subnormal half counts units of 2^-24, which is the unit in the last place of 0.5.
      half = bits(from_bits(magnitude) + 0.5F) - bits(0.5F);
    } else {
      half = (magnitude + 0xfff + ((magnitude >> 13) & 1) - ((127U - 15U) << 23)) >> 13;
    }
    store_u16(p, sign | half);
  }

  static void add_squares(D* sums, F x) {
    const double wide = x;
    sums[0] += wide * wide;
  }
};

}  // namespace hetero
