#include "io/page_checksums.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "checksum/crc32c.h"

namespace hetero {

PageChecksums::Checksums PageChecksums::of(const std::byte* memory, std::size_t nbytes) {
  Checksums found(nbytes / kPageBytes);
  for (std::size_t page = 0; page < found.size(); ++page) {
    found[page] = crc32c(memory + page * kPageBytes, kPageBytes);
  }
  return found;
}

std::optional<std::size_t> PageChecksums::first_difference(const std::byte* memory,
                                                           const Checksums& expected) {
  for (std::size_t page = 0; page < expected.size(); ++page) {
    if (expected[page] == 0) continue;
    if (crc32c(memory + page * kPageBytes, kPageBytes) != expected[page]) return page;
  }
  return std::nullopt;
}

void PageChecksums::require_pages(std::uint64_t offset, std::size_t nbytes) {
  if (offset % kPageBytes == 0 && nbytes % kPageBytes == 0) return;
  throw std::invalid_argument("a file with checksums has whole pages of " +
                              std::to_string(kPageBytes) + " bytes, not " + std::to_string(nbytes) +
                              " bytes at offset " + std::to_string(offset));
}

void PageChecksums::grow(Checksums& larger) {
  if (larger.size() <= table_.size()) return;
  std::ranges::copy(table_, larger.begin());
  table_.swap(larger);
}

void PageChecksums::set(std::uint64_t offset, const Checksums& checksums) {
  const std::size_t first = offset / kPageBytes;
  if (table_.size() < first + checksums.size()) table_.resize(first + checksums.size());
  std::ranges::copy(checksums, table_.begin() + static_cast<std::ptrdiff_t>(first));
}

PageChecksums::Checksums PageChecksums::get(std::uint64_t offset, std::size_t nbytes) const {
  Checksums found(nbytes / kPageBytes);
  const std::size_t first = offset / kPageBytes;
  if (first < table_.size()) {
    const std::size_t known = std::min(found.size(), table_.size() - first);
    std::copy_n(table_.begin() + static_cast<std::ptrdiff_t>(first), known, found.begin());
  }
  return found;
}

}  // namespace hetero
