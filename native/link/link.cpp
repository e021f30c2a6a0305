#include "link/link.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/quiet_thread.h"
#include "base/timeline.h"

namespace hetero {

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr double kLeastRate = 1000;  // slower ones would overflow the clock
// What is copied at a time: about a millisecond's worth.
constexpr double kPieceSeconds = 1e-3;
constexpr double kLeastPieceBytes = 4096;
constexpr double kMostPieceBytes = 4 << 20;

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

void LinkOp::wait() {
  while (!done()) {
    if (::getpid() != owner_) {
      throw std::runtime_error("this copy belongs to process " + std::to_string(owner_) +
                               ", from which this one was forked");
    }
    settled_.wait(0, std::memory_order_acquire);
  }
  if (error_ != 0) throw LinkError(direction_, nbytes_, moved_, error_);
}

// One direction.
class Link::Lane {
 public:
  struct Fault {
    std::uint64_t nth;  // counts down
    int error;
    std::uint64_t count;
  };

  Lane(const char* thread_name, double rate, timeline::Lane lane)
      : rate_(rate),
        lane_(lane),
        piece_bytes_(static_cast<std::size_t>(
                         std::clamp(rate * kPieceSeconds, kLeastPieceBytes, kMostPieceBytes)) /
                     64 * 64),
        thread_(quiet_thread(thread_name, [this] { work(); })) {}

  void submit(std::shared_ptr<LinkOp> op) {
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) throw std::runtime_error("the link is closed");
      op->submitted_ = Clock::now();
      queue_.push_back(std::move(op));
    }
    changed_.notify_one();
  }

  void cancel(LinkOp& op) {
    {
      const std::lock_guard lock(mutex_);
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

  LinkStats::Way stats() const {
    const std::lock_guard lock(mutex_);
    return stats_;
  }

  void inject(const Fault& fault) {
    const std::lock_guard lock(mutex_);
    faults_.push_back(fault);
  }

  void close() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      while (!queue_.empty()) {
        const std::shared_ptr<LinkOp> dropped = std::move(queue_.front());
        queue_.pop_front();
        settle(*dropped, ECANCELED);
      }
    }
    changed_.notify_one();
    const std::lock_guard joining(joining_);
    if (thread_.joinable()) thread_.join();
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const std::shared_ptr<LinkOp> op = std::move(queue_.front());
      queue_.pop_front();
      int error = next_fault();
      if (error == 0) {
        const Clock::time_point start = std::max(op->submitted_, due_);
        error = run(*op, start, lock);
        const Clock::time_point begin = std::max(start, busy_until_);
        busy_until_ = Clock::now();
        stats_.busy_s += Seconds(busy_until_ - begin).count();
        if (timeline::on() && op->moved_ != 0)
          timeline::note(lane_, begin, op->moved_, busy_until_);
      }
      settle(*op, error);
    }
  }

  // Copies and lets the time pass that it takes; 0 or errno. Needs the lock.
  int run(LinkOp& op, Clock::time_point start, std::unique_lock<std::mutex>& lock) {
    while (op.moved_ < op.nbytes_) {
      if (op.cancelled_ || stopping_) return ECANCELED;
      const std::size_t piece = std::min(piece_bytes_, op.nbytes_ - op.moved_);
      lock.unlock();
      std::memcpy(op.to_ + op.moved_, op.from_ + op.moved_, piece);
      lock.lock();
      op.moved_ += piece;
      stats_.bytes += piece;
      due_ = start + std::chrono::duration_cast<Clock::duration>(
                         Seconds(static_cast<double>(op.moved_) / rate_));
      changed_.wait_until(lock, due_, [&] { return op.cancelled_ || stopping_; });
    }
    return 0;
  }

  // Each fault counts the copies on its own, from when it was added.
  int next_fault() {
    int error = 0;
    for (Fault& fault : faults_) {
      if (fault.nth > 0) {
        --fault.nth;
      } else {
        --fault.count;
        error = fault.error;
      }
    }
    std::erase_if(faults_, [](const Fault& fault) { return fault.count == 0; });
    return error;
  }

  void settle(LinkOp& op, int error) {
    op.error_ = error;
    op.to_memory_.reset();
    op.from_memory_.reset();
    ++(error == 0 ? stats_.copies : stats_.errors);
    op.settled_.store(1, std::memory_order_release);
    op.settled_.notify_all();
  }

  const double rate_;
  const timeline::Lane lane_;
  const std::size_t piece_bytes_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;  // something to do, for the thread
  std::deque<std::shared_ptr<LinkOp>> queue_;
  Clock::time_point due_;         // when the last copy's time is over
  Clock::time_point busy_until_;  // when it was done
  bool stopping_ = false;
  LinkStats::Way stats_;
  std::vector<Fault> faults_;
  std::mutex joining_;
  std::thread thread_;  // last: it uses the others
};

Link::Link(double h2d_bytes_per_s, double d2h_bytes_per_s) : owner_(::getpid()) {
  const double h2d = checked_rate("h2d_bytes_per_s", h2d_bytes_per_s);
  const double d2h = checked_rate("d2h_bytes_per_s", d2h_bytes_per_s);
  h2d_ = std::make_unique<Lane>("hetero-h2d", h2d, timeline::Lane::h2d);
  try {
    d2h_ = std::make_unique<Lane>("hetero-d2h", d2h, timeline::Lane::d2h);
  } catch (...) {
    h2d_->close();
    throw;
  }
}

Link::~Link() {
  close();
  if (::getpid() != owner_) {
    // Their threads do not exist here, and their locks may be held by nobody: left alone for ever.
    static_cast<void>(h2d_.release());
    static_cast<void>(d2h_.release());
  }
}

Link::Lane& Link::lane(LinkDirection direction) const {
  if (::getpid() != owner_) {
    throw std::runtime_error("this link belongs to process " + std::to_string(owner_) +
                             ", from which this one was forked: make a new link here");
  }
  return direction == LinkDirection::h2d ? *h2d_ : *d2h_;
}

std::shared_ptr<LinkOp> Link::copy(LinkDirection direction, void* to, const void* from,
                                   std::size_t nbytes) {
  if (nbytes != 0 && (to == nullptr || from == nullptr)) {
    throw std::invalid_argument("a copy needs two addresses");
  }
  Lane& way = lane(direction);
  auto op = std::make_shared<LinkOp>();
  op->direction_ = direction;
  op->to_ = static_cast<std::byte*>(to);
  op->from_ = static_cast<const std::byte*>(from);
  op->nbytes_ = nbytes;
  op->to_memory_.emplace(Span::of_any(to, nbytes));
  op->from_memory_.emplace(Span::of_any(from, nbytes));
  op->owner_ = owner_;
  way.submit(op);
  return op;
}

void Link::cancel(LinkOp& op) {
  if (!op.done()) lane(op.direction_).cancel(op);
}

void Link::abandon(LinkOp& op) noexcept {
  if (::getpid() != owner_) return;
  try {
    cancel(op);
    op.wait();
  } catch (...) {  // Nobody wants to know how it ended.
  }
}

LinkStats Link::stats() const {
  return {lane(LinkDirection::h2d).stats(), lane(LinkDirection::d2h).stats()};
}

void Link::inject(LinkDirection direction, std::uint64_t nth, int error, std::uint64_t count) {
  if (error <= 0) throw std::invalid_argument("a fault needs a positive errno");
  if (count == 0) throw std::invalid_argument("a fault needs a count of at least 1");
  lane(direction).inject({nth, error, count});
}

void Link::close() {
  if (::getpid() != owner_) return;
  h2d_->close();
  d2h_->close();
}

}  // namespace hetero
