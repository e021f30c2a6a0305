#include "base/fork.h"

#include <pthread.h>
#include <unistd.h>

#include <set>
#include <stdexcept>
#include <string>

#include "base/timeline.h"

namespace hetero {

constinit Mutex process_mutex;

namespace {

struct ParentFds {
  std::set<int*> open GUARDED_BY(process_mutex);  // where a ParentFd has its number
};

// Never destroyed: at exit other threads may still use it.
ParentFds& all = *new ParentFds;

// The analysis cannot follow a lock that one function takes and another one lets go.
void before_fork() NO_THREAD_SAFETY_ANALYSIS { process_mutex.lock(); }

void in_parent() NO_THREAD_SAFETY_ANALYSIS { process_mutex.unlock(); }

void in_child() NO_THREAD_SAFETY_ANALYSIS {
  for (int* const fd : all.open) {
    ::close(*fd);
    *fd = -1;
  }
  all.open.clear();
  timeline::detail::forget();
  process_mutex.unlock();
}

// When the module is loaded, before any thread could fork in the midst of it.
[[maybe_unused]] const int registered = pthread_atfork(before_fork, in_parent, in_child);

}  // namespace

ForkGuard::ForkGuard(const char* what, const char* advice)
    : what_(what), advice_(advice), owner_(::getpid()) {}

bool ForkGuard::foreign() const { return ::getpid() != owner_; }

void ForkGuard::require_own() const {
  if (!foreign()) return;
  std::string text = std::string("this ") + what_ + " belongs to process " +
                     std::to_string(owner_) + ", from which this one was forked";
  if (advice_ != nullptr) text += std::string(": ") + advice_;
  throw std::runtime_error(text);
}

MutexLock::MutexLock(Mutex& mutex, const ForkGuard& guard) : mutex_(mutex) {
  guard.require_own();
  mutex.lock();
}

ParentFd::ParentFd(int fd) : fd_(fd) {
  if (fd < 0) return;
  try {
    const MutexLock lock(process_mutex);
    all.open.insert(&fd_);
  } catch (...) {
    ::close(fd);
    throw;
  }
}

void ParentFd::reset() {
  if (const int fd = release(); fd >= 0) ::close(fd);
}

// Out of the registry first: a closed number may soon be another file's.
int ParentFd::release() {
  if (fd_ < 0) return -1;
  const MutexLock lock(process_mutex);
  all.open.erase(&fd_);
  const int fd = fd_;
  fd_ = -1;
  return fd;
}

}  // namespace hetero
