// What the kinds of engines differ in: how blocks are taken, transferred and waited for, and what
// is registered with the kernel.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/thread_annotations.h"
#include "io/block_queue.h"
#include "memory/arena.h"

namespace hetero {

// What an engine and its driver's threads share.
struct SharedQueue {
  explicit SharedQueue(const IoOptions& options) : queue(options, settled) {}

  // Blocks until every operation submitted before this call is settled.
  void wait_for_earlier() REQUIRES(mutex) {
    const std::uint64_t end = queue.next_serial();
    while (!queue.settled_before(end)) settled.wait(mutex);
  }
  // Gives the blocks of queue.begin_pause() another try, after a pause without the mutex.
  void pause(Block* resting) REQUIRES(mutex) {
    {
      const MutexUnlock unlocked(mutex);
      std::this_thread::sleep_for(kStallPause);
    }
    queue.end_pause(resting);
  }
  // Keeps what the user should know, once.
  void note(std::string text) REQUIRES(mutex) {
    if (std::ranges::find(notes, text) == notes.end()) notes.push_back(std::move(text));
  }

  Mutex mutex;
  Condition settled;  // an operation is
  BlockQueue queue GUARDED_BY(mutex);
  std::vector<std::string> notes GUARDED_BY(mutex);
};

// All members but wake() are called without the mutex.
class Driver {
 public:
  virtual ~Driver() = default;
  // `waiting` blocks may be taken. Called with the mutex held.
  virtual void wake(std::size_t waiting) = 0;
  // As IoEngine's, of an engine that is open.
  virtual bool register_memory(const Arena& arena) = 0;
  virtual void unregister_memory(const Arena& arena) = 0;
  // Joins the threads and gives back kernel objects. Called once, when no operation is left.
  virtual void stop() = 0;
};

// Throws std::invalid_argument for a number of threads out of range.
std::unique_ptr<Driver> make_thread_driver(SharedQueue& shared, const IoOptions& options);
// Throws std::system_error when the kernel refuses a ring, std::invalid_argument when
// HETERO_URING_SETUP in the environment is not "defer", "coop" or "plain".
std::unique_ptr<Driver> make_uring_driver(SharedQueue& shared, const IoOptions& options);

}  // namespace hetero
