#include "base/timeline.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "base/fork.h"
#include "base/thread_annotations.h"

namespace hetero::timeline {

namespace detail {
std::atomic<bool> recording{false};
}

namespace {

struct Recorder {
  Mutex mutex;
  Recording current GUARDED_BY(mutex);  // meaningful while a recording is under way

  // A child has no recording: who makes it is the parent.
  void in_child() REQUIRES(mutex) {
    detail::recording.store(false, std::memory_order_relaxed);
    current = {};
  }
};

}  // namespace

// `recording` changes with the mutex held, under which those who saw it look again; so its own
// loads and stores need no order.
void start(std::size_t capacity) {
  Recorder& all = process_wide<Recorder>();
  const MutexLock lock(all.mutex);
  if (on()) throw std::logic_error("a timeline is being recorded already");
  all.current = {};
  all.current.intervals.reserve(capacity);
  all.current.begin = Clock::now();
  detail::recording.store(true, std::memory_order_relaxed);
}

Recording stop() {
  Recorder& all = process_wide<Recorder>();
  const MutexLock lock(all.mutex);
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
  Recorder& all = process_wide<Recorder>();
  const MutexLock lock(all.mutex);
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
