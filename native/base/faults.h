// Faults to be injected into a sequence of events, for tests.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

namespace hetero {

// Each fault counts the events on its own, from when it was added.
template <typename What>
class Faults {
 public:
  // The `nth` event from now (from 0) and the `count` - 1 after it meet `what`. Throws
  // std::invalid_argument for a count of 0.
  void add(std::uint64_t nth, std::uint64_t count, const What& what) {
    if (count == 0) throw std::invalid_argument("a fault needs a count of at least 1");
    counters_.push_back({nth, count, what});
  }

  // Counts an event, and calls meet(what) for each fault that it meets.
  template <typename Meet>
  void next(Meet meet) {
    if (counters_.empty()) return;
    for (Counter& each : counters_) {
      if (each.before > 0) {
        --each.before;
      } else {
        --each.count;
        meet(each.what);
      }
    }
    std::erase_if(counters_, [](const Counter& each) { return each.count == 0; });
  }

 private:
  struct Counter {
    std::uint64_t before;
    std::uint64_t count;
    What what;
  };
  std::vector<Counter> counters_;
};

}  // namespace hetero
