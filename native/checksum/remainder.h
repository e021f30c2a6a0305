// Remainders of polynomials over GF(2) modulo Castagnoli's, and the tables made of them.
//
// A remainder has the coefficient of x^0 in its highest bit and that of x^31 in its lowest, as the
// checksum has it, whose bits are reflected. One more zero bit after the data multiplies the
// remainder by x; so n zero bytes multiply it by x^(8n), and everything here is such a product.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace hetero::checksum {

using Remainder = std::uint32_t;

inline constexpr Remainder kPolynomial = 0x82f63b78;  // without its x^32
inline constexpr Remainder kOne = 0x80000000;         // x^0

constexpr Remainder times_x(Remainder a) {
  return (a >> 1) ^ ((a & 1) != 0 ? kPolynomial : Remainder{0});
}

constexpr Remainder product(Remainder a, Remainder b) {
  Remainder sum = 0;
  for (Remainder power = kOne; power != 0; power >>= 1) {
    if ((a & power) != 0) sum ^= b;
    b = times_x(b);
  }
  return sum;
}

// Element k: what 2^k zero bytes multiply a remainder by.
inline constexpr auto kZeroBytes = [] {
  std::array<Remainder, 64> factors{};
  Remainder factor = kOne >> 8;  // x^8: one byte
  for (Remainder& each : factors) {
    each = factor;
    factor = product(factor, factor);
  }
  return factors;
}();

// `a` after so many zero bytes.
constexpr Remainder after_zeros(Remainder a, std::uint64_t nbytes) {
  for (std::size_t k = 0; nbytes != 0; ++k, nbytes >>= 1) {
    if ((nbytes & 1) != 0) a = product(kZeroBytes[k], a);
  }
  return a;
}

// The product with a fixed factor, a byte at a time: [v] is that of the remainder `v << shift`.
using ByteTable = std::array<Remainder, 256>;

constexpr ByteTable byte_table(int shift, std::uint64_t zero_bytes) {
  ByteTable table{};
  for (std::size_t v = 1; v < table.size(); ++v) {
    const std::size_t lowest = v & (~v + 1);
    // Products are linear: only those of single bits are multiplied out.
    table[v] = v == lowest ? after_zeros(static_cast<Remainder>(v) << shift, zero_bytes)
                           : table[v ^ lowest] ^ table[lowest];
  }
  return table;
}

// The remainder after `nbytes` more bytes, with nothing inverted.
using Implementation = Remainder(Remainder, const unsigned char* data, std::size_t nbytes);

Implementation by_instruction;  // of x86-64 and 64-bit ARM, if the CPU has it

}  // namespace hetero::checksum
