#include "checksum/crc32c.h"

#include "checksum/remainder.h"
#include "update/isa/isa.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace hetero {
namespace {

using checksum::byte_table;
using checksum::ByteTable;
using checksum::Implementation;
using checksum::Remainder;

constexpr ByteTable kTable = byte_table(0, 1);

// Where the CPU has no instruction for it, a byte at a time.
Remainder by_table(Remainder remainder, const unsigned char* data, std::size_t nbytes) {
  for (; nbytes != 0; ++data, --nbytes) {
    remainder = (remainder >> 8) ^ kTable[(remainder ^ *data) & 0xff];
  }
  return remainder;
}

Implementation& implementation() {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2") != 0;
#elif defined(__aarch64__)  // optional in the first version of ARMv8
  static const bool has_instruction = (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#endif
#if defined(__x86_64__) || defined(__aarch64__)
  if (has_instruction && &kernels() != &scalar_kernels) return checksum::by_instruction;
#endif
  return by_table;
}

}  // namespace

// The checksum begins with all ones, so that zeros in front count, and ends inverted; inverted once
// more it is the remainder that the next bytes go on with.
std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t crc) {
  return ~implementation()(~crc, static_cast<const unsigned char*>(data), nbytes);
}

}  // namespace hetero
