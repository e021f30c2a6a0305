// What vector types have in common. Their numbers are computed with by operators, which mean the
// same for one number and, as GCC and Clang extend them, for every number of a vector.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hetero {

// The interface of a vector type V. V::F holds `lanes` fp32 values, V::U as many 32-bit words, V::D
// `double_lanes` doubles, all with operators. Addresses need no alignment. Every operation is
// IEEE's, rounded to nearest even; conversions are exact or rounded to nearest even, subnormals
// included. Beside what is here there are
//
//     U iota()                      0, 1, 2, ...: the lanes' numbers
//     U load_u16(p), store_u16(p, x)   the low halves
//     U load_u8(p), store_u8(p, x)     the low bytes; x is below 256
//     std::uint32_t largest(x)         of the lanes' words
//     F load_f16(p), store_f16(p, x)
//     F load_f8<is_signed>(p)          bytes that are the upper part of fp16 but for the highest
//     bit
//                                   of its exponent: sign, 4 exponent bits, 3 fraction bits; or,
//                                   without a sign, 4 exponent bits, 4 fraction bits
//     F sqrt(x)
//     F fma(a, b, c)                a * b + c, rounded once
//     add_squares(D* sums, x)       adds the squares of x's lanes, in order, to lanes /
//                                   double_lanes accumulators. (The square of an fp32 value is
//                                   exact in double, so it may be fused with the sum or not.)
template <class Float, class Word, class Double>
struct VecOperators {
  using F = Float;
  using U = Word;
  using D = Double;
  // A float is a vector of one lane. NOLINTNEXTLINE(bugprone-sizeof-expression)
  static constexpr std::size_t lanes = sizeof(F) / sizeof(float);
  // Likewise. NOLINTNEXTLINE(bugprone-sizeof-expression)
  static constexpr std::size_t double_lanes = sizeof(D) / sizeof(double);

  static F set(float x) { return x - F{}; }
  static F load(const char* p) { return get<F>(p); }
  static void store(char* p, F x) { put(p, x); }
  static void store_double(double* p, D x) { put(reinterpret_cast<char*>(p), x); }
  static U set_bits(std::uint32_t x) { return x + U{}; }
  static U bits(F x) { return get<U>(reinterpret_cast<const char*>(&x)); }
  static F from_bits(U x) { return get<F>(reinterpret_cast<const char*>(&x)); }
  static U if_nan(F x, U then, U otherwise) { return x != x ? then : otherwise; }
  static U if_zero(F x, U then, U otherwise) { return x == 0.0F ? then : otherwise; }
  // 0 where x is zero or subnormal, which is where its exponent's bits are all 0.
  static U if_normal(F x, U then) { return (bits(x) & 0x7f800000U) != 0U ? then : U{}; }

 protected:
  template <class T>
  static T get(const char* p) {
    T value;
    __builtin_memcpy(&value, p, sizeof value);
    return value;
  }
  template <class T>
  static void put(char* p, T value) {
    __builtin_memcpy(p, &value, sizeof value);
  }
};

}  // namespace hetero
