// An emulated link between host and device memory: background copies at a settable bandwidth.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <thread>

#include "base/completion.h"
#include "base/faults.h"
#include "base/fork.h"
#include "base/thread_annotations.h"
#include "base/timeline.h"
#include "link/copier.h"
#include "memory/arena.h"

namespace hetero {

enum class LinkDirection { h2d, d2h };

// The handle of one copy. Shared by the submitter and the link.
class LinkOp : public Completion {
 public:
  LinkOp(LinkDirection direction, std::byte* to, const std::byte* from, std::size_t nbytes);

  // Blocks. Throws CopyError if the copy did not come to its end: ECANCELED if cancel() or close()
  // cut it off, EIO and others if they were injected.
  void wait();

 private:
  friend class Link;

  const LinkDirection direction_;
  std::byte* const to_;
  const std::byte* const from_;
  const std::size_t nbytes_;
  Span to_memory_, from_memory_;  // let go when settled
  std::chrono::steady_clock::time_point submitted_;
  // The link's, under its direction's mutex; the waiter reads them once the copy is settled.
  std::size_t moved_ = 0;
  int error_ = 0;
  bool cancelled_ = false;
};

// Counters of one direction since the link was made.
struct LinkStats {
  std::uint64_t bytes = 0;   // copied
  std::uint64_t copies = 0;  // that came to their end
  std::uint64_t errors = 0;  // copies that did not
  double busy_s = 0;         // that copies took, waiting for the end of their time included
};

// Two directions, each with a thread and a first-in-first-out queue of its own. A copy is done not
// before nbytes / bandwidth after it was submitted and the one before it was due, so copies add up
// and idle time is not saved up. Its bytes arrive part by part over that time.
//
// All members may be called from any thread. After fork() a link belongs to the parent alone: in
// the child every use throws and close() does nothing.
class Link {
 public:
  // Bytes per second; throws std::invalid_argument unless both are finite and at least 1000. To be
  // made by make_own().
  Link(double h2d_bytes_per_s, double d2h_bytes_per_s);
  ~Link() { close(); }
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  bool foreign() const { return fork_.foreign(); }

  // Memory in an arena is kept, and counts the transfer, until the copy is done; other memory (the
  // caller's tensors) must stay until then. Throws std::invalid_argument for what begins in an
  // arena and reaches past its end, std::runtime_error after close().
  std::shared_ptr<LinkOp> copy(LinkDirection direction, void* to, const void* from,
                               std::size_t nbytes);
  // Drops what is not copied yet; wait() then throws ECANCELED. Nothing if all is. `op` is this
  // link's.
  void cancel(LinkOp& op);
  LinkStats stats(LinkDirection direction);
  // For tests: the nth copy of `direction` to begin from now (from 0), and the `count` - 1 after
  // it, fail with `error` and copy nothing. Throws std::invalid_argument for what is no fault.
  void inject(LinkDirection direction, std::uint64_t nth, int error, std::uint64_t count);
  // Cancels all copies and joins the threads; idempotent.
  void close();

 private:
  using Clock = std::chrono::steady_clock;

  struct Way {
    Way(double bytes_per_s, timeline::Lane name);

    void work() EXCLUDES(mutex);
    int run(LinkOp& op, Clock::time_point start) REQUIRES(mutex);
    void settle(LinkOp& op, int error) REQUIRES(mutex);
    void close() EXCLUDES(mutex, joining);

    const double rate;
    const timeline::Lane lane;
    const std::size_t part_bytes;
    Mutex mutex;
    Condition changed;  // something to do, for the thread
    std::deque<std::shared_ptr<LinkOp>> queue GUARDED_BY(mutex);
    Clock::time_point due GUARDED_BY(mutex);         // when the last copy's time is over
    Clock::time_point busy_until GUARDED_BY(mutex);  // when it was done
    bool stopping GUARDED_BY(mutex) = false;
    LinkStats stats GUARDED_BY(mutex);
    Faults<int> faults GUARDED_BY(mutex);  // errnos
    Mutex joining;
    std::thread thread GUARDED_BY(joining);
  };

  Way& way(LinkDirection direction);  // throws in a forked child

  const ForkGuard fork_{"link", "make a new link here"};
  std::array<Way, 2> ways_;  // by direction
};

// For gradients on their way to RAM over the link.
std::unique_ptr<Copier> make_link_copier(std::shared_ptr<Link> link);

}  // namespace hetero
