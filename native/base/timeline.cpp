#include "base/timeline.h"

#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace hetero::timeline {

namespace detail {
std::atomic<bool> recording{false};
}

namespace {

std::mutex mutex;
// Under the mutex, and meaningful while a recording is under way.
Recording current;
// Whose recording it is: a forked child has the flag, and perhaps the mutex in a locked state.
std::atomic<pid_t> owner{0};

}  // namespace

const char* name_of(Lane lane) {
  switch (lane) {
    case Lane::update:
      return "update";
    case Lane::nvme_read:
      return "nvme_read";
    case Lane::nvme_write:
      return "nvme_write";
    case Lane::h2d:
      return "h2d";
    case Lane::d2h:
      return "d2h";
  }
  throw std::logic_error("unknown lane");
}

void start(std::size_t capacity) {
  const std::lock_guard lock(mutex);
  if (on()) throw std::logic_error("a timeline is being recorded already");
  current = {};
  current.intervals.reserve(capacity);
  current.begin = Clock::now();
  owner.store(::getpid(), std::memory_order_relaxed);
  detail::recording.store(true, std::memory_order_relaxed);
}

Recording stop() {
  const std::lock_guard lock(mutex);
  if (!on()) throw std::logic_error("no timeline is being recorded");
  detail::recording.store(false, std::memory_order_relaxed);
  current.end = Clock::now();
  return std::exchange(current, {});
}

void note(Lane lane, Clock::time_point begin, std::uint64_t bytes, Clock::time_point end) noexcept {
  if (owner.load(std::memory_order_relaxed) != ::getpid()) return;
  const std::lock_guard lock(mutex);
  if (!on()) return;
  if (current.intervals.size() == current.intervals.capacity()) {
    ++current.dropped;
    return;
  }
  current.intervals.push_back(
      {lane, std::max(begin, current.begin), std::max(end, current.begin), bytes});
}

}  // namespace hetero::timeline
