// What a forked child does with objects of its parent: their threads do not exist in the child, and
// their locks may be held by nobody.
#pragma once

#include <sys/types.h>

#include "base/thread_annotations.h"

namespace hetero {

// For a mutex of the whole process that is taken last: from now on it is held across fork(), so
// that the child finds it free and what it guards whole. In the child `in_child` is called before.
void hold_across_fork(Mutex& mutex, void (*in_child)() = nullptr);

// The one T of the process, never destroyed: at exit other threads may still use it. T::mutex is
// held across fork(); T::in_child() is called in the child, before the mutex is let go.
template <class T>
T& process_wide() {
  static T* const made = [] {
    auto* const fresh = new T;
    hold_across_fork(fresh->mutex,
                     []() NO_THREAD_SAFETY_ANALYSIS { process_wide<T>().in_child(); });
    return fresh;
  }();
  return *made;
}

// Belongs to an object that only the process which made it can use.
class ForkGuard {
 public:
  // For the message: `what` the object is ("I/O engine"), and what to do instead, if anything.
  explicit ForkGuard(const char* what, const char* advice = nullptr);

  // Whether this process was forked from the one that made the object.
  bool foreign() const;
  // Throws std::runtime_error if so.
  void require_own() const;

 private:
  const char* const what_;
  const char* const advice_;
  const pid_t owner_;
};

// A file descriptor that a forked child closes at once. Otherwise the child would keep alive what
// the descriptor stands for: an unlinked file's space, a ring and the memory that it has pinned.
class ParentFd {
 public:
  ParentFd() = default;
  // Takes `fd`, which may be -1; closes it if this throws std::bad_alloc.
  explicit ParentFd(int fd);
  ParentFd(const ParentFd&) = delete;
  ParentFd& operator=(const ParentFd&) = delete;
  ~ParentFd() { reset(); }

  int get() const { return fd_; }  // -1 in a forked child
  void reset();                    // closes it
  int release();                   // gives it to the caller

 private:
  int fd_ = -1;
};

}  // namespace hetero
