// The loop over a CPU's own CRC-32C instruction, written once for all that have one.
//
// The instruction takes 8 bytes, a new one may begin every cycle, and its result is there some
// three cycles later. So the data are taken as three streams that lie one behind the other, whose
// remainders do not wait for each other, and these are joined afterwards: V. Gopal et al., "Fast
// CRC Computation for iSCSI Polynomial Using CRC32 Instruction", Intel, 2011.
//
// An Instruction has byte(remainder, uint8_t) and word(remainder, uint64_t), which give the
// remainder after these bytes. It is a type without linkage, because each is compiled with
// instructions that other files must not get by way of a shared template.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "checksum/remainder.h"

namespace hetero::checksum {

// Streams of twice that are a tenth faster in a cache and a third slower beyond the caches, where
// memory is best read in one sequence (measured on AMD Zen 5).
inline constexpr std::size_t kStreamBytes = 256;

inline std::uint64_t load(const unsigned char* at) {
  std::uint64_t word;  // both kinds of CPU are little-endian
  std::memcpy(&word, at, sizeof word);
  return word;
}

template <typename Instruction>
Remainder by_instruction(Remainder remainder, const unsigned char* at, std::size_t nbytes) {
  using AfterStream = AfterZeros<kStreamBytes>;
  for (; nbytes >= 3 * kStreamBytes; nbytes -= 3 * kStreamBytes) {
    Remainder first = remainder, second = 0, third = 0;
    for (const unsigned char* const end = at + kStreamBytes; at != end; at += 8) {
      first = Instruction::word(first, load(at));
      second = Instruction::word(second, load(at + kStreamBytes));
      third = Instruction::word(third, load(at + 2 * kStreamBytes));
    }
    remainder = AfterStream::of(AfterStream::of(first) ^ second) ^ third;
    at += 2 * kStreamBytes;
  }
  for (; nbytes >= 8; at += 8, nbytes -= 8) remainder = Instruction::word(remainder, load(at));
  for (; nbytes != 0; ++at, --nbytes) remainder = Instruction::byte(remainder, *at);
  return remainder;
}

}  // namespace hetero::checksum
