// How the bytes of one logical file lie in several member files.
//
// The file is cut into units, and the units are dealt to the members by a pattern that repeats:
// member m gets `weights[m]` of the pattern's sum(weights) places, spread as evenly as integers
// allow. A member's units follow one another in its file without gaps. Pure arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hetero {

class StripeMap {
 public:
  struct Place {
    std::size_t member;
    std::uint64_t offset;     // in the member
    std::uint64_t run_bytes;  // from there on that are contiguous in file and member
  };

  // One member, whose offsets are the file's.
  StripeMap() : StripeMap({1}, kUnitMultiple) {}
  // Throws std::invalid_argument unless there is a weight, all are at least 1, their sum is at most
  // 4096, and `unit_bytes` is a multiple of 4096 up to 1 GiB.
  StripeMap(const std::vector<unsigned>& weights, std::uint64_t unit_bytes);

  std::size_t members() const { return positions_.size(); }
  std::uint64_t unit_bytes() const { return unit_bytes_; }
  // The member of each place.
  std::vector<unsigned> pattern() const;

  Place place(std::uint64_t offset) const;
  // How many of the file's first `nbytes` lie in `member`, which are that member's first ones.
  std::uint64_t member_bytes(std::size_t member, std::uint64_t nbytes) const;

 private:
  static constexpr std::uint64_t kUnitMultiple = 4096;

  struct PatternUnit {
    unsigned member;
    unsigned rank;  // among the member's places in the pattern
    unsigned run;   // places from here to the next of another member, or to the pattern's end
  };

  std::uint64_t unit_bytes_;
  std::vector<PatternUnit> cycle_;
  std::vector<std::vector<unsigned>> positions_;  // of each member's places in the pattern
};

}  // namespace hetero
