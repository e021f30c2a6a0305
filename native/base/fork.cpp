#include "base/fork.h"

#include <pthread.h>
#include <unistd.h>

#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace hetero {

namespace {

// What make_once() has made. Kept for ever: at exit other threads may still fork.
struct AcrossFork {
  Mutex mutex;
  std::vector<HeldAcrossFork> held GUARDED_BY(mutex);
};

AcrossFork& across_fork() {
  static AcrossFork* const made = [] {
    // The analysis cannot follow a lock that one function takes and another one lets go.
    pthread_atfork(
        []() NO_THREAD_SAFETY_ANALYSIS {
          across_fork().mutex.lock();
          for (const HeldAcrossFork& each : across_fork().held) each.mutex->lock();
        },
        []() NO_THREAD_SAFETY_ANALYSIS {
          for (const HeldAcrossFork& each : across_fork().held) each.mutex->unlock();
          across_fork().mutex.unlock();
        },
        []() NO_THREAD_SAFETY_ANALYSIS {
          for (const HeldAcrossFork& each : across_fork().held) {
            each.in_child(each.object);
            each.mutex->unlock();
          }
          across_fork().mutex.unlock();
        });
    return new AcrossFork;
  }();
  return *made;
}

// When the module is loaded, before any thread could fork in the midst of it.
[[maybe_unused]] const AcrossFork& made_at_load = across_fork();

struct ParentFds {
  Mutex mutex;
  std::set<int*> open GUARDED_BY(mutex);  // where a ParentFd has its number

  void in_child() REQUIRES(mutex) {
    for (int* const fd : open) {
      ::close(*fd);
      *fd = -1;
    }
    open.clear();
  }
};

}  // namespace

void* make_once(std::atomic<void*>& made, HeldAcrossFork (*make)()) {
  AcrossFork& all = across_fork();
  const MutexLock lock(all.mutex);
  if (void* const found = made.load(std::memory_order_acquire)) return found;
  all.held.push_back(make());
  made.store(all.held.back().object, std::memory_order_release);
  return all.held.back().object;
}

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
    ParentFds& all = process_wide<ParentFds>();
    const MutexLock lock(all.mutex);
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
  ParentFds& all = process_wide<ParentFds>();
  const MutexLock lock(all.mutex);
  all.open.erase(&fd_);
  const int fd = fd_;
  fd_ = -1;
  return fd;
}

}  // namespace hetero
