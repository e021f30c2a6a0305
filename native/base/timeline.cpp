#include "base/timeline.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "base/fork.h"

namespace hetero::timeline {

namespace {

struct Recorder {
  Recording current GUARDED_BY(process_mutex);  // meaningful while a recording is under way
};

// Never destroyed: at exit other threads may still use it.
Recorder& all = *new Recorder;

}  // namespace

namespace detail {

std::atomic<bool> recording{false};

void forget() {
  if (!on()) return;
  recording.store(false, std::memory_order_relaxed);
  all.current = {};
}

}  // namespace detail

// `recording` changes with the mutex held, under which those who saw it look again; so its own
// loads and stores need no order.
void start(std::size_t capacity) {
  const MutexLock lock(process_mutex);
  if (on()) throw std::logic_error("a timeline is being recorded already");
  all.current = {};
  all.current.intervals.reserve(capacity);
  all.current.begin = Clock::now();
  detail::recording.store(true, std::memory_order_relaxed);
}

Recording stop() {
  const MutexLock lock(process_mutex);
  if (!on()) throw std::logic_error("no timeline is being recorded");
  detail::recording.store(false, std::memory_order_relaxed);
  all.current.end = Clock::now();
  Recording found = std::exchange(all.current, {});
  // A thread may wait between the end of what it notes and the note, while others have the CPU.
  std::ranges::stable_sort(found.intervals, {}, &Interval::end);
  return found;
}

void note(Lane lane, Clock::time_point begin, std::uint64_t bytes, Clock::time_point end) noexcept {
  if (!on()) return;
  const MutexLock lock(process_mutex);
  if (!on()) return;
  Recording& current = all.current;
  if (current.intervals.size() == current.intervals.capacity()) {
    ++current.dropped;
    return;
  }
  current.intervals.push_back(
      {lane, std::max(begin, current.begin), std::max(end, current.begin), bytes});
}

}  // namespace hetero::timeline
