// Checksums of a file's pages: what was written, to be compared with what is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace hetero {

// The CRC-32C of each page of a file; 0 of a page of which nothing is known. (A page that has this
// checksum, one in 2^32, is not verified.)
class PageChecksums {
 public:
  static constexpr std::size_t kPageBytes = 4096;
  using Checksums = std::vector<std::uint32_t>;

  // Those of whole pages in memory.
  static Checksums of(const std::byte* memory, std::size_t nbytes);
  // The first page in memory that is not as `expected` says, which has one checksum a page.
  static std::optional<std::size_t> first_difference(const std::byte* memory,
                                                     const Checksums& expected);

  // Throws std::invalid_argument unless the bytes are whole pages.
  static void require_pages(std::uint64_t offset, std::size_t nbytes);
  // The table of a file of `nbytes`, to be made before a lock is taken, for grow().
  static Checksums table_of(std::uint64_t nbytes) { return Checksums(nbytes / kPageBytes); }
  // Takes `larger`, if it is larger, in the table's place, and leaves the old table there.
  void grow(Checksums& larger);
  void set(std::uint64_t offset, const Checksums& checksums);
  Checksums get(std::uint64_t offset, std::size_t nbytes) const;

 private:
  Checksums table_;
};

}  // namespace hetero
