#include "checksum/crc32c.h"

#include <array>
#include <cstring>

#include "update/isa/isa.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace hetero {
namespace {

// The remainder of a polynomial over GF(2) modulo Castagnoli's, with the coefficient of x^0 in its
// highest bit and that of x^31 in its lowest, as the checksum has it, whose bits are reflected.
using Remainder = std::uint32_t;
using Table = std::array<Remainder, 256>;

constexpr Remainder kPolynomial = 0x82f63b78;  // without its x^32

// By the remainder's lowest byte, what it becomes after one more byte of zeros.
constexpr Table kAfterByte = [] {
  Table table{};
  for (Remainder v = 0; v < table.size(); ++v) {
    table[v] = v;
    for (int bit = 0; bit < 8; ++bit) {
      table[v] = (table[v] >> 1) ^ ((table[v] & 1) != 0 ? kPolynomial : Remainder{0});
    }
  }
  return table;
}();

constexpr Remainder after_byte(Remainder remainder, std::uint8_t byte) {
  return (remainder >> 8) ^ kAfterByte[(remainder ^ byte) & 0xff];
}

// Where the CPU has no instruction for it, a byte at a time.
Remainder by_table(Remainder remainder, const unsigned char* at, std::size_t nbytes) {
  for (; nbytes != 0; ++at, --nbytes) remainder = after_byte(remainder, *at);
  return remainder;
}

#if defined(__x86_64__) || defined(__aarch64__)

// The instruction takes 8 bytes, a new one may begin every cycle, and its result is there some
// three cycles later. So the data are taken as three streams that lie one behind the other, whose
// remainders do not wait for each other, and these are joined afterwards: V. Gopal et al., "Fast
// CRC Computation for iSCSI Polynomial Using CRC32 Instruction", Intel, 2011.
//
// Streams of twice that are a tenth faster in a cache and a third slower beyond the caches, where
// memory is best read in one sequence (measured on AMD Zen 5).
constexpr std::size_t kStreamBytes = 256;

// What a remainder becomes after a stream of zeros, by each of its bytes.
constexpr std::array<Table, 4> kAfterStream = [] {
  std::array<Table, 4> tables{};
  for (std::size_t byte = 0; byte < tables.size(); ++byte) {
    Table& table = tables[byte];
    for (Remainder v = 1; v < table.size(); ++v) {
      const Remainder lowest = v & (~v + 1);
      if (v != lowest) {  // it is linear, so only single bits go through the stream
        table[v] = table[v ^ lowest] ^ table[lowest];
        continue;
      }
      table[v] = v << (8 * byte);
      for (std::size_t i = 0; i < kStreamBytes; ++i) table[v] = after_byte(table[v], 0);
    }
  }
  return tables;
}();

Remainder after_stream(Remainder a) {
  return kAfterStream[0][a & 0xff] ^ kAfterStream[1][(a >> 8) & 0xff] ^
         kAfterStream[2][(a >> 16) & 0xff] ^ kAfterStream[3][a >> 24];
}

// In assembler, because nothing else here may be compiled for CPUs that have the instruction.
Remainder after_word(Remainder remainder, const unsigned char* at) {
  std::uint64_t word;  // both kinds of CPU are little-endian
  std::memcpy(&word, at, sizeof word);
#if defined(__x86_64__)
  std::uint64_t wide = remainder;
  asm("crc32q %1, %0" : "+r"(wide) : "r"(word));
  return static_cast<Remainder>(wide);
#else
  asm(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(remainder) : "r"(word));
  return remainder;
#endif
}

Remainder by_instruction(Remainder remainder, const unsigned char* at, std::size_t nbytes) {
  for (; nbytes >= 3 * kStreamBytes; nbytes -= 3 * kStreamBytes) {
    Remainder first = remainder, second = 0, third = 0;
    for (const unsigned char* const end = at + kStreamBytes; at != end; at += 8) {
      first = after_word(first, at);
      second = after_word(second, at + kStreamBytes);
      third = after_word(third, at + 2 * kStreamBytes);
    }
    remainder = after_stream(after_stream(first) ^ second) ^ third;
    at += 2 * kStreamBytes;
  }
  for (; nbytes >= 8; at += 8, nbytes -= 8) remainder = after_word(remainder, at);
  return by_table(remainder, at, nbytes);
}

bool has_instruction() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("sse4.2") != 0;
#else  // optional in the first version of ARMv8
  return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#endif
}

#else

constexpr auto* by_instruction = by_table;
bool has_instruction() { return false; }

#endif

}  // namespace

// The checksum begins with all ones, so that zeros in front count, and ends inverted; inverted once
// more it is the remainder that the next bytes go on with.
std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t crc) {
  static const bool has = has_instruction();
  const bool uses_it = has && &kernels() != &scalar_kernels;
  return ~(uses_it ? by_instruction : by_table)(~crc, static_cast<const unsigned char*>(data),
                                                nbytes);
}

}  // namespace hetero
