#include <array>
#include <cstdint>

#include "checksum/implementations.h"

namespace hetero::checksum {
namespace {

// Eight bytes at a time, each with a table of its own, which also counts the bytes that follow it
// among the eight: "slicing-by-8" of M. Kounavis and F. Berry, "A Systematic Approach to Building
// High Performance Software-based CRC Generators", ISCC 2005.
constexpr std::array<ByteTable, 8> kTables = {byte_table(0, 8), byte_table(0, 7), byte_table(0, 6),
                                              byte_table(0, 5), byte_table(0, 4), byte_table(0, 3),
                                              byte_table(0, 2), byte_table(0, 1)};

// Little-endian on every machine; compilers know this for a single load where it is one.
std::uint32_t load(const unsigned char* at) {
  return static_cast<std::uint32_t>(at[0]) | static_cast<std::uint32_t>(at[1]) << 8 |
         static_cast<std::uint32_t>(at[2]) << 16 | static_cast<std::uint32_t>(at[3]) << 24;
}

}  // namespace

Remainder by_tables(Remainder remainder, const unsigned char* data, std::size_t nbytes) {
  for (; nbytes >= 8; data += 8, nbytes -= 8) {
    const std::uint32_t low = load(data) ^ remainder, high = load(data + 4);
    remainder = 0;
    for (std::size_t i = 0; i < 4; ++i) {
      remainder ^= kTables[i][(low >> (8 * i)) & 0xff] ^ kTables[4 + i][(high >> (8 * i)) & 0xff];
    }
  }
  for (; nbytes != 0; ++data, --nbytes) {
    remainder = (remainder >> 8) ^ kTables[7][(remainder ^ *data) & 0xff];
  }
  return remainder;
}

}  // namespace hetero::checksum
