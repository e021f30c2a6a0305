#include "link/link.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "base/quiet_thread.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace hetero {

namespace {

using Seconds = std::chrono::duration<double>;

constexpr double kLeastRate = 1000;  // slower ones would overflow the clock
// What is copied at a time: about a millisecond's worth.
constexpr double kPartSeconds = 1e-3;
constexpr double kLeastPartBytes = 4096;
constexpr double kMostPartBytes = 4 << 20;

double checked_rate(const std::string& direction, double rate) {
  if (!std::isfinite(rate) || rate < kLeastRate) {
    throw std::invalid_argument(direction +
                                "_bytes_per_s must be a number of bytes per second of at least "
                                "1000, not " +
                                std::to_string(rate));
  }
  return rate;
}

// As std::memcpy() of bytes that nobody reads soon: the target's lines are not read first, and
// nothing that compute has in the caches makes place for them. (memcpy() does so only for what is
// larger than most of the last cache. Measured: 17 to 19 GB/s in place of 10 to 11, out of cache.)
void stream_copy(std::byte* to, const std::byte* from, std::size_t nbytes) {
#if defined(__SSE2__)
  constexpr std::size_t kLine = 64, kStore = sizeof(__m128i);
  const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
  if (nbytes >= head + kLine) {
    std::memcpy(to, from, head);
    const std::size_t lines = (nbytes - head) / kLine * kLine;
    for (std::size_t at = head; at < head + lines; at += kLine) {
      __m128i line[kLine / kStore];
      std::memcpy(line, from + at, kLine);
      for (std::size_t i = 0; i < kLine / kStore; ++i) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + at + i * kStore), line[i]);
      }
    }
    _mm_sfence();  // such stores are ordered with no others, not even by locks
    to += head + lines, from += head + lines, nbytes -= head + lines;
  }
#endif
  std::memcpy(to, from, nbytes);
}

// Copies over an emulated link.
class LinkCopier : public Copier {
 public:
  explicit LinkCopier(std::shared_ptr<Link> link) : link_(std::move(link)) {}

  // What is on an emulated device has its values always, so there are no events.
  std::unique_ptr<Copy> start(std::byte* to, const std::byte* from, std::size_t nbytes,
                              std::uintptr_t) override {
    return std::make_unique<LinkCopy>(*link_, link_->copy(LinkDirection::d2h, to, from, nbytes));
  }

 private:
  struct LinkCopy : Copy {
    LinkCopy(Link& link, std::shared_ptr<LinkOp> op) : link(link), op(std::move(op)) {}

    void wait() override { op->wait(); }
    // (In a forked child, where the link throws, no thread comes here.)
    // NOLINTNEXTLINE(bugprone-exception-escape)
    void cancel() noexcept override { link.cancel(*op); }

    Link& link;
    const std::shared_ptr<LinkOp> op;
  };

  const std::shared_ptr<Link> link_;
};

}  // namespace

LinkOp::LinkOp(LinkDirection direction, std::byte* to, const std::byte* from, std::size_t nbytes)
    : Completion("copy"),
      direction_(direction),
      to_(to),
      from_(from),
      nbytes_(nbytes),
      to_memory_(Span::of_any(to, nbytes)),
      from_memory_(Span::of_any(from, nbytes)) {}

void LinkOp::wait() {
  wait_done();
  if (error_ == 0) return;
  const char* const way = direction_ == LinkDirection::h2d ? "host to device" : "device to host";
  throw CopyError(error_, "copy of " + std::to_string(nbytes_) + " bytes from " + way +
                              " failed after " + std::to_string(moved_) +
                              " bytes: " + std::generic_category().message(error_));
}

Link::Way::Way(double bytes_per_s, timeline::Lane name)
    : rate(checked_rate(name, bytes_per_s)),
      lane(name),
      part_bytes(static_cast<std::size_t>(
                     std::clamp(rate * kPartSeconds, kLeastPartBytes, kMostPartBytes)) /
                 64 * 64) {}

void Link::Way::work() {
  const MutexLock lock(mutex);
  for (;;) {
    while (!stopping && queue.empty()) changed.wait(mutex);
    if (queue.empty()) return;
    const std::shared_ptr<LinkOp> op = std::move(queue.front());
    queue.pop_front();
    int error = 0;
    faults.next([&](int fault) { error = fault; });
    if (error == 0) {
      const Clock::time_point start = std::max(op->submitted_, due);
      error = run(*op, start);
      const Clock::time_point begin = std::max(start, busy_until);
      busy_until = Clock::now();
      stats.busy_s += Seconds(busy_until - begin).count();
      if (timeline::on() && op->moved_ != 0) timeline::note(lane, begin, op->moved_, busy_until);
    }
    settle(*op, error);
  }
}

// Copies and lets the time pass that it takes; 0 or errno.
int Link::Way::run(LinkOp& op, Clock::time_point start) {
  while (op.moved_ < op.nbytes_) {
    if (op.cancelled_ || stopping) return ECANCELED;
    const std::size_t part = std::min(part_bytes, op.nbytes_ - op.moved_);
    {
      const MutexUnlock unlocked(mutex);
      stream_copy(op.to_ + op.moved_, op.from_ + op.moved_, part);
    }
    op.moved_ += part;
    stats.bytes += part;
    due = start + std::chrono::duration_cast<Clock::duration>(
                      Seconds(static_cast<double>(op.moved_) / rate));
    while (!op.cancelled_ && !stopping && changed.wait_until(mutex, due)) {
    }
  }
  return 0;
}

void Link::Way::settle(LinkOp& op, int error) {
  op.error_ = error;
  op.to_memory_.release();
  op.from_memory_.release();
  ++(error == 0 ? stats.copies : stats.errors);
  op.settle();
}

void Link::Way::close() {
  {
    const MutexLock lock(mutex);
    stopping = true;
    while (!queue.empty()) {
      const std::shared_ptr<LinkOp> dropped = std::move(queue.front());
      queue.pop_front();
      settle(*dropped, ECANCELED);
    }
  }
  changed.notify_one();
  const MutexLock lock(joining);
  if (thread.joinable()) thread.join();
}

Link::Link(double h2d_bytes_per_s, double d2h_bytes_per_s)
    : ways_{Way(h2d_bytes_per_s, "h2d"), Way(d2h_bytes_per_s, "d2h")} {
  try {
    for (Way& each : ways_) {
      const MutexLock lock(each.joining);
      each.thread =
          quiet_thread((std::string("hetero-") + each.lane).c_str(), [&each] { each.work(); });
    }
  } catch (...) {
    close();
    throw;
  }
}

Link::Way& Link::way(LinkDirection direction) {
  fork_.require_own();
  return ways_[static_cast<std::size_t>(direction)];
}

std::shared_ptr<LinkOp> Link::copy(LinkDirection direction, void* to, const void* from,
                                   std::size_t nbytes) {
  if (nbytes != 0 && (to == nullptr || from == nullptr)) {
    throw std::invalid_argument("a copy needs two addresses");
  }
  Way& used = way(direction);
  auto op = std::make_shared<LinkOp>(direction, static_cast<std::byte*>(to),
                                     static_cast<const std::byte*>(from), nbytes);
  {
    const MutexLock lock(used.mutex);
    if (used.stopping) throw std::runtime_error("the link is closed");
    op->submitted_ = Clock::now();
    used.queue.push_back(op);
  }
  used.changed.notify_one();
  return op;
}

void Link::cancel(LinkOp& op) {
  if (op.done()) return;
  Way& used = way(op.direction_);
  const MutexLock lock(used.mutex);
  if (op.done()) return;
  op.cancelled_ = true;
  const auto found = std::ranges::find(used.queue, &op, &std::shared_ptr<LinkOp>::get);
  if (found == used.queue.end()) return used.changed.notify_one();  // it is being copied
  const std::shared_ptr<LinkOp> dropped = std::move(*found);
  used.queue.erase(found);
  used.settle(*dropped, ECANCELED);
}

LinkStats Link::stats(LinkDirection direction) {
  Way& asked = way(direction);
  const MutexLock lock(asked.mutex);
  return asked.stats;
}

void Link::inject(LinkDirection direction, std::uint64_t nth, int error, std::uint64_t count) {
  if (error <= 0) throw std::invalid_argument("a fault needs a positive errno");
  Way& used = way(direction);
  const MutexLock lock(used.mutex);
  used.faults.add(nth, count, error);
}

void Link::close() {
  if (foreign()) return;
  for (Way& each : ways_) each.close();
}

std::unique_ptr<Copier> make_link_copier(std::shared_ptr<Link> link) {
  return std::make_unique<LinkCopier>(std::move(link));
}

}  // namespace hetero
