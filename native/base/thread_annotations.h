// Locks that the compiler checks: which mutex guards a member, and which functions need it held.
//
// Clang's -Wthread-safety reads these attributes (`make lint` runs it); other compilers see nothing
// of them. A function that is called with a mutex held says REQUIRES(mutex); a function that must
// not hold it because it takes it itself, and could be called with it by mistake, says
// EXCLUDES(mutex).
#pragma once

#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define HETERO_THREAD_ATTRIBUTE(x) __attribute__((x))
#else
#define HETERO_THREAD_ATTRIBUTE(x)
#endif

#define CAPABILITY(name) HETERO_THREAD_ATTRIBUTE(capability(name))
#define SCOPED_CAPABILITY HETERO_THREAD_ATTRIBUTE(scoped_lockable)
#define GUARDED_BY(mutex) HETERO_THREAD_ATTRIBUTE(guarded_by(mutex))
#define ACQUIRED_BEFORE(...) HETERO_THREAD_ATTRIBUTE(acquired_before(__VA_ARGS__))
#define REQUIRES(...) HETERO_THREAD_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) HETERO_THREAD_ATTRIBUTE(locks_excluded(__VA_ARGS__))
#define ACQUIRE(...) HETERO_THREAD_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define RELEASE(...) HETERO_THREAD_ATTRIBUTE(release_capability(__VA_ARGS__))
#define ASSERT_CAPABILITY(x) HETERO_THREAD_ATTRIBUTE(assert_capability(x))
// For what the analysis cannot follow (locks across fork, predicates); a comment says why.
#define NO_THREAD_SAFETY_ANALYSIS HETERO_THREAD_ATTRIBUTE(no_thread_safety_analysis)

namespace hetero {

class ForkGuard;

class CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }
  // Tells the analysis, in a lambda or after a callback, what it cannot see: the caller holds it.
  void assert_held() const ASSERT_CAPABILITY(this) {}

 private:
  friend class Condition;
  std::mutex mutex_;
};

// Holds a mutex for a scope.
class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex.lock(); }
  // Throws first what guard.require_own() does (base/fork.h).
  MutexLock(Mutex& mutex, const ForkGuard& guard) ACQUIRE(mutex);
  ~MutexLock() RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// Lets a mutex that is held go for a scope.
class SCOPED_CAPABILITY MutexUnlock {
 public:
  explicit MutexUnlock(Mutex& mutex) RELEASE(mutex) : mutex_(mutex) { mutex.unlock(); }
  // The attribute of a scope's end is RELEASE whatever the scope does: it ends the inversion.
  ~MutexUnlock() RELEASE() { mutex_.lock(); }
  MutexUnlock(const MutexUnlock&) = delete;
  MutexUnlock& operator=(const MutexUnlock&) = delete;

 private:
  Mutex& mutex_;
};

// A condition variable. Waiters loop: `while (!ready_) changed_.wait(mutex_);`, because the
// analysis does not see into a predicate that is passed.
class Condition {
 public:
  void notify_one() { condition_.notify_one(); }
  void notify_all() { condition_.notify_all(); }

  void wait(Mutex& mutex) REQUIRES(mutex) {
    std::unique_lock<std::mutex> held(mutex.mutex_, std::adopt_lock);
    condition_.wait(held);
    held.release();
  }

 private:
  std::condition_variable condition_;
};

}  // namespace hetero
