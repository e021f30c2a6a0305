// The ways to compute a CRC-32C: one for every machine, and one for each CPU instruction.
#pragma once

#include <cstddef>

#include "checksum/remainder.h"

namespace hetero::checksum {

// The remainder after `nbytes` more bytes, with nothing inverted.
using Implementation = Remainder(Remainder, const unsigned char* data, std::size_t nbytes);

Implementation by_tables;
Implementation by_sse42;  // x86-64
Implementation by_armv8;  // 64-bit ARM

}  // namespace hetero::checksum
