#include "link/link.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <deque>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/faults.h"
#include "base/quiet_thread.h"
#include "base/stream_copy.h"
#include "base/thread_annotations.h"
#include "base/timeline.h"

namespace hetero {

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr double kLeastRate = 1000;  // slower ones would overflow the clock
// What is copied at a time: about a millisecond's worth.
constexpr double kPartSeconds = 1e-3;
constexpr double kLeastPartBytes = 4096;
constexpr double kMostPartBytes = 4 << 20;

double checked_rate(const char* name, double rate) {
  if (!std::isfinite(rate) || rate < kLeastRate) {
    throw std::invalid_argument(std::string(name) +
                                " must be a number of bytes per second of at least 1000, not " +
                                std::to_string(rate));
  }
  return rate;
}

std::string describe(LinkDirection direction, std::size_t wanted_bytes, std::size_t got_bytes,
                     int error) {
  return "copy of " + std::to_string(wanted_bytes) + " bytes from " +
         (direction == LinkDirection::h2d ? "host to device" : "device to host") +
         " failed after " + std::to_string(got_bytes) +
         " bytes: " + std::generic_category().message(error) + " (errno " + std::to_string(error) +
         ")";
}

}  // namespace

LinkError::LinkError(LinkDirection direction, std::size_t wanted_bytes, std::size_t got_bytes,
                     int error)
    : std::runtime_error(describe(direction, wanted_bytes, got_bytes, error)),
      direction(direction),
      wanted_bytes(wanted_bytes),
      got_bytes(got_bytes),
      error(error) {}

LinkOp::LinkOp(LinkDirection direction, std::byte* to, const std::byte* from, std::size_t nbytes)
    : direction_(direction),
      to_(to),
      from_(from),
      nbytes_(nbytes),
      to_memory_(Span::of_any(to, nbytes)),
      from_memory_(Span::of_any(from, nbytes)) {}

void LinkOp::wait() {
  completion_.wait();
  if (error_ != 0) throw LinkError(direction_, nbytes_, moved_, error_);
}

// One direction.
class Link::Way {
 public:
  Way(const char* thread_name, double rate, timeline::Lane lane)
      : rate_(rate),
        lane_(lane),
        part_bytes_(static_cast<std::size_t>(
                        std::clamp(rate * kPartSeconds, kLeastPartBytes, kMostPartBytes)) /
                    64 * 64),
        thread_(quiet_thread(thread_name, [this] { work(); })) {}

  void submit(std::shared_ptr<LinkOp> op) {
    {
      const MutexLock lock(mutex_);
      if (stopping_) throw std::runtime_error("the link is closed");
      op->submitted_ = Clock::now();
      queue_.push_back(std::move(op));
    }
    changed_.notify_one();
  }

  void cancel(LinkOp& op) {
    {
      const MutexLock lock(mutex_);
      if (op.done()) return;
      op.cancelled_ = true;
      const auto found =
          std::find_if(queue_.begin(), queue_.end(), [&](const auto& q) { return q.get() == &op; });
      if (found != queue_.end()) {
        const std::shared_ptr<LinkOp> dropped = std::move(*found);
        queue_.erase(found);
        settle(*dropped, ECANCELED);
        return;
      }
    }
    changed_.notify_one();  // it is being copied
  }

  LinkStats::Direction stats() const {
    const MutexLock lock(mutex_);
    return stats_;
  }

  void inject(std::uint64_t nth, std::uint64_t count, int error) {
    const MutexLock lock(mutex_);
    faults_.add(nth, count, error);
  }

  void close() {
    {
      const MutexLock lock(mutex_);
      stopping_ = true;
      while (!queue_.empty()) {
        const std::shared_ptr<LinkOp> dropped = std::move(queue_.front());
        queue_.pop_front();
        settle(*dropped, ECANCELED);
      }
    }
    changed_.notify_one();
    const MutexLock joining(joining_);
    if (thread_.joinable()) thread_.join();
  }

 private:
  void work() {
    const MutexLock lock(mutex_);
    for (;;) {
      while (!stopping_ && queue_.empty()) changed_.wait(mutex_);
      if (queue_.empty()) return;
      const std::shared_ptr<LinkOp> op = std::move(queue_.front());
      queue_.pop_front();
      int error = 0;
      faults_.next([&](int fault) { error = fault; });
      if (error == 0) {
        const Clock::time_point start = std::max(op->submitted_, due_);
        error = run(*op, start);
        const Clock::time_point begin = std::max(start, busy_until_);
        busy_until_ = Clock::now();
        stats_.busy_s += Seconds(busy_until_ - begin).count();
        if (timeline::on() && op->moved_ != 0)
          timeline::note(lane_, begin, op->moved_, busy_until_);
      }
      settle(*op, error);
    }
  }

  // Copies and lets the time pass that it takes; 0 or errno.
  int run(LinkOp& op, Clock::time_point start) REQUIRES(mutex_) {
    while (op.moved_ < op.nbytes_) {
      if (op.cancelled_ || stopping_) return ECANCELED;
      const std::size_t part = std::min(part_bytes_, op.nbytes_ - op.moved_);
      {
        const MutexUnlock unlocked(mutex_);
        stream_copy(op.to_ + op.moved_, op.from_ + op.moved_, part);
      }
      op.moved_ += part;
      stats_.bytes += part;
      due_ = start + std::chrono::duration_cast<Clock::duration>(
                         Seconds(static_cast<double>(op.moved_) / rate_));
      while (!op.cancelled_ && !stopping_ && changed_.wait_until(mutex_, due_)) {
      }
    }
    return 0;
  }

  void settle(LinkOp& op, int error) REQUIRES(mutex_) {
    op.error_ = error;
    op.to_memory_.release();
    op.from_memory_.release();
    ++(error == 0 ? stats_.copies : stats_.errors);
    op.completion_.settle();
  }

  const double rate_;
  const timeline::Lane lane_;
  const std::size_t part_bytes_;
  mutable Mutex mutex_;
  Condition changed_;  // something to do, for the thread
  std::deque<std::shared_ptr<LinkOp>> queue_ GUARDED_BY(mutex_);
  Clock::time_point due_ GUARDED_BY(mutex_);         // when the last copy's time is over
  Clock::time_point busy_until_ GUARDED_BY(mutex_);  // when it was done
  bool stopping_ GUARDED_BY(mutex_) = false;
  LinkStats::Direction stats_ GUARDED_BY(mutex_);
  Faults<int> faults_ GUARDED_BY(mutex_);  // errnos
  Mutex joining_;
  std::thread thread_ GUARDED_BY(joining_);  // last: it uses the others
};

Link::Link(double h2d_bytes_per_s, double d2h_bytes_per_s) {
  const double h2d = checked_rate("h2d_bytes_per_s", h2d_bytes_per_s);
  const double d2h = checked_rate("d2h_bytes_per_s", d2h_bytes_per_s);
  h2d_ = std::make_unique<Way>("hetero-h2d", h2d, "h2d");
  try {
    d2h_ = std::make_unique<Way>("hetero-d2h", d2h, "d2h");
  } catch (...) {
    h2d_->close();
    throw;
  }
}

Link::~Link() {
  close();
  if (fork_.foreign()) {
    // Their threads do not exist here, and their locks may be held by nobody: left alone for ever.
    static_cast<void>(h2d_.release());
    static_cast<void>(d2h_.release());
  }
}

Link::Way& Link::way(LinkDirection direction) const {
  fork_.require_own();
  return direction == LinkDirection::h2d ? *h2d_ : *d2h_;
}

std::shared_ptr<LinkOp> Link::copy(LinkDirection direction, void* to, const void* from,
                                   std::size_t nbytes) {
  if (nbytes != 0 && (to == nullptr || from == nullptr)) {
    throw std::invalid_argument("a copy needs two addresses");
  }
  Way& used = way(direction);
  auto op = std::make_shared<LinkOp>(direction, static_cast<std::byte*>(to),
                                     static_cast<const std::byte*>(from), nbytes);
  used.submit(op);
  return op;
}

void Link::cancel(LinkOp& op) {
  if (!op.done()) way(op.direction_).cancel(op);
}

void Link::abandon(LinkOp& op) noexcept {
  if (fork_.foreign()) return;
  try {
    cancel(op);
    op.wait();
  } catch (...) {  // Nobody wants to know how it ended.
  }
}

LinkStats Link::stats() const {
  return {way(LinkDirection::h2d).stats(), way(LinkDirection::d2h).stats()};
}

void Link::inject(LinkDirection direction, std::uint64_t nth, int error, std::uint64_t count) {
  if (error <= 0) throw std::invalid_argument("a fault needs a positive errno");
  way(direction).inject(nth, count, error);
}

void Link::close() {
  if (fork_.foreign()) return;
  h2d_->close();
  d2h_->close();
}

}  // namespace hetero
