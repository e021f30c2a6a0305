// What a forked child does with objects of its parent: their threads do not exist in the child, and
// their locks may be held by nobody.
#pragma once

#include <sys/types.h>

#include <memory>
#include <utility>

#include "base/thread_annotations.h"

namespace hetero {

// Guards what the process has one of, and is held across fork(), so that the child finds it free
// and what it guards whole. It is taken last.
extern Mutex process_mutex;

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
