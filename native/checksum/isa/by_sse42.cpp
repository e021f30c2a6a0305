#include <nmmintrin.h>

#include "checksum/implementations.h"
#include "checksum/streams.inl.h"

namespace hetero::checksum {
namespace {

struct Sse42 {
  static Remainder byte(Remainder remainder, std::uint8_t data) {
    return _mm_crc32_u8(remainder, data);
  }
  static Remainder word(Remainder remainder, std::uint64_t data) {
    return static_cast<Remainder>(_mm_crc32_u64(remainder, data));
  }
};

}  // namespace

Remainder by_sse42(Remainder remainder, const unsigned char* data, std::size_t nbytes) {
  return by_instruction<Sse42>(remainder, data, nbytes);
}

}  // namespace hetero::checksum
