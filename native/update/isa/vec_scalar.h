// One lane of plain C++: the truth that the vector types are compared with.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace hetero {

// The interface of a vector type. F holds `lanes` fp32 values, U as many 32-bit words, D
// `double_lanes` doubles. Addresses need no alignment. Every operation is IEEE's, rounded to
// nearest even; conversions are exact or rounded to nearest even, subnormals included.
struct VecScalar {
  static constexpr std::size_t lanes = 1;
  static constexpr std::size_t double_lanes = 1;
  using F = float;
  using U = std::uint32_t;
  using D = double;

  static F set(float x) { return x; }
  static F load(const char* p) { return get<float>(p); }
  static void store(char* p, F x) { put(p, x); }
  static F add(F a, F b) { return a + b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F sqrt(F x) { return std::sqrt(x); }
  static F fma(F a, F b, F c) { return std::fma(a, b, c); }  // a * b + c, rounded once

  static U set_bits(std::uint32_t x) { return x; }
  static U iota() { return 0; }  // 0, 1, 2, ...: the lanes' numbers
  static U load_u16(const char* p) { return get<std::uint16_t>(p); }
  static void store_u16(char* p, U x) { put(p, static_cast<std::uint16_t>(x)); }  // the low halves
  static U bits(F x) { return get<U>(reinterpret_cast<const char*>(&x)); }
  static F from_bits(U x) { return get<F>(reinterpret_cast<const char*>(&x)); }
  static U add(U a, U b) { return a + b; }
  static U sub(U a, U b) { return a - b; }
  static U mul(U a, U b) { return a * b; }  // modulo 2^32
  static U bit_and(U a, U b) { return a & b; }
  static U bit_or(U a, U b) { return a | b; }
  static U bit_xor(U a, U b) { return a ^ b; }
  template <int count>  // 1 to 31, as in shift_right
  static U shift_left(U x) {
    return x << count;
  }
  template <int count>
  static U shift_right(U x) {
    return x >> count;
  }
  static U if_nan(F x, U then, U otherwise) { return x != x ? then : otherwise; }
  static U if_zero(F x, U then, U otherwise) { return x == 0 ? then : otherwise; }
  // 0 where x is zero or subnormal, which is where its exponent's bits are all 0.
  static U if_normal(F x, U then) { return (bits(x) & 0x7f800000) != 0 ? then : 0; }

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

  static D zero_double() { return 0.0; }
  static void store_double(double* p, D x) { *p = x; }
  // Adds the squares of x's lanes, in order, to lanes / double_lanes accumulators. The square of
  // an fp32 value is exact in double, so it does not matter whether the sum is fused.
  static void add_squares(D* sums, F x) {
    const double wide = x;
    sums[0] += wide * wide;
  }

 private:
  template <class T>
  static T get(const char* p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
  }
  template <class T>
  static void put(char* p, T value) {
    std::memcpy(p, &value, sizeof value);
  }
};

}  // namespace hetero
