// CRC-32C (Castagnoli), the checksum of iSCSI (RFC 3720), ext4 and btrfs: the polynomial
// 0x1edc6f41, bits reflected, begun with all ones and inverted at the end.
//
// It finds every change that lies within 32 consecutive bits, and any other with a probability of
// 1 - 2^-32. It is no protection from somebody who changes bytes on purpose.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hetero {

// The checksum of `nbytes` bytes, by one thread. `crc` is that of the bytes before them, 0 if there
// are none: crc32c(b, crc32c(a)) is the checksum of a and b, one after the other. By the CPU's own
// instruction for it (SSE 4.2, ARMv8), unless it has none or isa() is "scalar"; the number is the
// same.
std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t crc = 0);

}  // namespace hetero
