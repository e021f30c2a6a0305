// What the native core's resources were busy with, and when. Off unless somebody records, and then
// a hook costs one relaxed load.
//
// Times are of the monotonic clock, which is Python's time.perf_counter(), so that what Python
// records beside lies on the same axis.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/fork.h"

namespace hetero::timeline {

using Clock = std::chrono::steady_clock;

// A resource: "update", "nvme_read" or "nvme_write". Constants.
using Lane = const char*;

// The resource was busy with `bytes` bytes of one thing.
struct Interval {
  Lane lane;
  Clock::time_point begin, end;
  std::uint64_t bytes;
};

struct Recording {
  Clock::time_point begin, end;
  std::vector<Interval> intervals;  // in the order of their ends
  std::uint64_t dropped = 0;        // that found no room
};

// Room for `capacity` intervals is taken here and nowhere else. Throws std::logic_error if a
// recording is under way.
void start(std::size_t capacity);
// Throws std::logic_error if none is, as in a forked child, which has none.
Recording stop();

namespace detail {
extern std::atomic<bool> recording;
// In a forked child: who makes the recording is the parent.
void forget() REQUIRES(process_mutex);
}  // namespace detail

inline bool on() { return detail::recording.load(std::memory_order_relaxed); }

// Keeps when something began that note() will tell of.
inline void mark(Clock::time_point& begun) {
  if (on() && begun == Clock::time_point()) begun = Clock::now();
}

// The resource was busy from `begin` to `end`. What began before the recording, or was never
// marked, counts from the recording's start. Nothing if none is under way.
void note(Lane lane, Clock::time_point begin, std::uint64_t bytes,
          Clock::time_point end = Clock::now()) noexcept;

}  // namespace hetero::timeline
