#include <arm_acle.h>

#include "checksum/implementations.h"
#include "checksum/streams.inl.h"

namespace hetero::checksum {
namespace {

struct Armv8 {
  static Remainder byte(Remainder remainder, std::uint8_t data) {
    return __crc32cb(remainder, data);
  }
  static Remainder word(Remainder remainder, std::uint64_t data) {
    return __crc32cd(remainder, data);
  }
};

}  // namespace

Remainder by_armv8(Remainder remainder, const unsigned char* data, std::size_t nbytes) {
  return by_instruction<Armv8>(remainder, data, nbytes);
}

}  // namespace hetero::checksum
