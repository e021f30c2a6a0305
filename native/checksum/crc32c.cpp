#include "checksum/crc32c.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

#include "checksum/implementations.h"
#include "checksum/remainder.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace hetero {
namespace {

using checksum::Implementation;

struct Candidate {
  const char* name;
  bool (*runs_here)();
  Implementation* implementation;
};

#if defined(__x86_64__)
bool has_sse42() { return __builtin_cpu_supports("sse4.2") != 0; }
#elif defined(__aarch64__)
// Optional in the first version of ARMv8.
bool has_crc32() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#endif

constexpr Candidate kCandidates[] = {
#if defined(__x86_64__)
    {"sse4.2", has_sse42, checksum::by_sse42},
#elif defined(__aarch64__)
    {"armv8", has_crc32, checksum::by_armv8},
#endif
    {"tables", [] { return true; }, checksum::by_tables},
};

// The checksum begins with all ones, so that zeros in front count, and ends inverted; inverted once
// more it is the remainder that the next bytes go on with.
std::uint32_t compute(Implementation& implementation, const void* data, std::size_t nbytes,
                      std::uint32_t crc) {
  return ~implementation(~crc, static_cast<const unsigned char*>(data), nbytes);
}

}  // namespace

std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t crc) {
  static Implementation& best = *std::ranges::find_if(kCandidates, [](const Candidate& each) {
                                   return each.runs_here();
                                 })->implementation;
  return compute(best, data, nbytes, crc);
}

std::uint32_t crc32c_joined(std::uint32_t first, std::uint32_t second,
                            std::uint64_t second_nbytes) {
  // With `zeros` for the factor of so many zero bytes, `rest` for the remainder of the second bytes
  // alone, and + for exclusive or, what is asked for is ones + (first + ones) * zeros + rest, and
  // `second` is ones + ones * zeros + rest.
  return checksum::after_zeros(first, second_nbytes) ^ second;
}

std::vector<std::string> crc32c_implementations() {
  std::vector<std::string> names;
  for (const Candidate& each : kCandidates) {
    if (each.runs_here()) names.emplace_back(each.name);
  }
  return names;
}

std::uint32_t crc32c_by(const std::string& implementation, const void* data, std::size_t nbytes,
                        std::uint32_t crc) {
  std::string available;
  for (const Candidate& each : kCandidates) {
    if (!each.runs_here()) continue;
    if (implementation == each.name) return compute(*each.implementation, data, nbytes, crc);
    available += available.empty() ? "" : ", ";
    available += each.name;
  }
  throw std::invalid_argument("implementation '" + implementation +
                              "' of crc32c is not available; this machine has " + available);
}

}  // namespace hetero
