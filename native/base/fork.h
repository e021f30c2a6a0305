// What a forked child does with objects of its parent: their threads do not exist in the child, and
// their locks may be held by nobody.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <memory>
#include <utility>

#include "base/thread_annotations.h"

namespace hetero {

// An object of the whole process, with its mutex that is held across fork(), so that the child
// finds it free and what it guards whole. In the child `in_child(object)` is called before.
struct HeldAcrossFork {
  void* object;
  Mutex* mutex;
  void (*in_child)(void*);
};

// What `made` points to; if nothing, what `make` returns from now on. No fork comes in between.
void* make_once(std::atomic<void*>& made, HeldAcrossFork (*make)());

// The one T of the process, never destroyed: at exit other threads may still use it. T::mutex is
// held across fork(), so it is taken last; T::in_child() is called in the child, before the mutex
// is let go.
template <class T>
T& process_wide() {
  // No `static T`: the child of a fork while another thread initializes that would wait for ever.
  static constinit std::atomic<void*> made{nullptr};
  void* found = made.load(std::memory_order_acquire);
  if (found == nullptr) {
    found = make_once(made, [] {
      auto* const fresh = new T;
      const auto in_child = [](void* object)
                                NO_THREAD_SAFETY_ANALYSIS { static_cast<T*>(object)->in_child(); };
      return HeldAcrossFork{fresh, &fresh->mutex, in_child};
    });
  }
  return *static_cast<T*>(found);
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

// A T that belongs to this process: ~T(), which ends its threads, is not called in a forked child,
// where they do not exist and its locks may be held by nobody. Its memory is left alone there.
template <class T, class... Arguments>
std::shared_ptr<T> make_own(Arguments&&... arguments) {
  return {new T(std::forward<Arguments>(arguments)...), [](T* object) {
            if (!object->foreign()) delete object;
          }};
}

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
