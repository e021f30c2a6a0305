// CRC-32C (Castagnoli), the checksum of iSCSI (RFC 3720), ext4 and btrfs: the polynomial
// 0x1edc6f41, bits reflected, begun with all ones and inverted at the end.
//
// It finds every change that lies within 32 consecutive bits, and any other with a probability of
// 1 - 2^-32. It is no protection from somebody who changes bytes on purpose.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace hetero {

// The checksum of `nbytes` bytes, by one thread. `crc` is that of the bytes before them, 0 if there
// are none: crc32c(b, crc32c(a)) is the checksum of a and b, one after the other.
std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t crc = 0);

// The checksum of bytes with checksum `first`, followed by `second_nbytes` bytes with checksum
// `second`. It takes less than a microsecond, however many they are. So threads, or the ranks that
// have the parts, compute the checksum of something together.
std::uint32_t crc32c_joined(std::uint32_t first, std::uint32_t second, std::uint64_t second_nbytes);

// The implementations that this machine can run, best first: "sse4.2" or "armv8", if its CPU has
// such instructions, and "tables". All give the same numbers; crc32c() takes the first. (HETERO_ISA
// chooses among vector instructions and says nothing about these.)
std::vector<std::string> crc32c_implementations();

// crc32c() by one of them, for tests and measurements. Throws std::invalid_argument for a name that
// is not in crc32c_implementations().
std::uint32_t crc32c_by(const std::string& implementation, const void* data, std::size_t nbytes,
                        std::uint32_t crc = 0);

}  // namespace hetero
