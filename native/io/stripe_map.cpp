#include "io/stripe_map.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

namespace hetero {

namespace {

constexpr std::uint64_t kMaxPlaces = 4096;
constexpr std::uint64_t kMaxUnitBytes = std::uint64_t{1} << 30;

}  // namespace

StripeMap::StripeMap(const std::vector<unsigned>& weights, std::uint64_t unit_bytes)
    : unit_bytes_(unit_bytes), positions_(weights.size()) {
  if (unit_bytes == 0 || unit_bytes > kMaxUnitBytes || unit_bytes % kUnitMultiple != 0) {
    throw std::invalid_argument("unit_bytes must be a multiple of 4096 up to 1 GiB, not " +
                                std::to_string(unit_bytes));
  }
  const auto places = std::accumulate(weights.begin(), weights.end(), std::uint64_t{0});
  if (weights.empty() || std::ranges::find(weights, 0u) != weights.end() || places > kMaxPlaces) {
    throw std::invalid_argument(
        "a stripe map needs one weight per member, each at least 1, and at most " +
        std::to_string(kMaxPlaces) + " in all");
  }
  // Every place goes to the member that is furthest behind its share.
  std::vector<std::int64_t> credit(weights.size(), 0);
  for (unsigned position = 0; position < places; ++position) {
    for (std::size_t member = 0; member < weights.size(); ++member) {
      credit[member] += weights[member];
    }
    const auto next = static_cast<unsigned>(std::ranges::max_element(credit) - credit.begin());
    credit[next] -= static_cast<std::int64_t>(places);
    cycle_.push_back({next, static_cast<unsigned>(positions_[next].size()), 1});
    positions_[next].push_back(position);
  }
  for (std::size_t position = cycle_.size() - 1; position-- > 0;) {
    const PatternUnit& after = cycle_[position + 1];
    if (after.member == cycle_[position].member) cycle_[position].run = after.run + 1;
  }
}

std::vector<unsigned> StripeMap::pattern() const {
  std::vector<unsigned> members;
  members.reserve(cycle_.size());
  for (const PatternUnit& at : cycle_) members.push_back(at.member);
  return members;
}

StripeMap::Place StripeMap::place(std::uint64_t offset) const {
  if (members() == 1) return {0, offset, std::numeric_limits<std::uint64_t>::max() - offset};
  const std::uint64_t unit = offset / unit_bytes_, within = offset % unit_bytes_;
  const PatternUnit& at = cycle_[unit % cycle_.size()];
  const std::uint64_t rank = unit / cycle_.size() * positions_[at.member].size() + at.rank;
  return {at.member, rank * unit_bytes_ + within, at.run * unit_bytes_ - within};
}

std::uint64_t StripeMap::member_bytes(std::size_t member, std::uint64_t nbytes) const {
  const std::vector<unsigned>& mine = positions_.at(member);
  const std::uint64_t unit = nbytes / unit_bytes_;
  const std::uint64_t position = unit % cycle_.size();
  const auto before = std::ranges::lower_bound(mine, position) - mine.begin();
  const std::uint64_t whole =
      unit / cycle_.size() * mine.size() + static_cast<std::uint64_t>(before);
  const bool last_is_mine = cycle_[position].member == member;
  return whole * unit_bytes_ + (last_is_mine ? nbytes % unit_bytes_ : 0);
}

}  // namespace hetero
