#include "base/worker_pool.h"

#include <pthread.h>
#include <sched.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

#include "base/float_state.h"
#include "base/quiet_thread.h"
#include "base/usable_cpus.h"

namespace hetero {
namespace {

// Returns 0, or the errno that says why not.
int run_on(pthread_t thread, int cpu) {
  if (cpu < 0 || cpu >= CPU_SETSIZE) return EINVAL;
  cpu_set_t mask;
  CPU_ZERO(&mask);
  CPU_SET(static_cast<std::size_t>(cpu), &mask);
  return pthread_setaffinity_np(thread, sizeof mask, &mask);
}

// Asks the kernel, on a thread that is there for nothing else: the caller's own mask would not do,
// because a program that gives the workers CPUs often gives the caller another one.
void check_usable(const std::vector<int>& cpus) {
  if (cpus.empty()) {
    throw std::invalid_argument(
        "set_threads: cpus is empty, must name at least one CPU; None gives none");
  }
  const int* refused = nullptr;
  int error = 0;
  quiet_thread("hetero-probe", [&] {
    for (const int& cpu : cpus) {
      error = run_on(pthread_self(), cpu);
      if (error != 0) {
        refused = &cpu;
        return;
      }
    }
  }).join();
  if (refused != nullptr) {
    throw std::invalid_argument(
        "set_threads: this process cannot run on CPU " + std::to_string(*refused) + " (" +
        std::generic_category().message(error) + "); see Cpus_allowed_list in /proc/self/status");
  }
}

}  // namespace

std::atomic<WorkerPool*> WorkerPool::instance_{nullptr};

WorkerPool& WorkerPool::instance() {
  // The pool is replaced in a forked child, where the parent's workers do not exist and its locks
  // may be held by nobody; the old object is left alone for ever.
  static const bool made = [] {
    instance_ = new WorkerPool(usable_cpus(), std::nullopt);
    pthread_atfork(before_fork, after_fork, in_child);
    return true;
  }();
  static_cast<void>(made);
  return *instance_;
}

void WorkerPool::before_fork() { instance_.load()->mutex_.lock(); }

void WorkerPool::after_fork() { instance_.load()->mutex_.unlock(); }

void WorkerPool::in_child() {
  const WorkerPool& parents = *instance_.load();
  instance_ = new WorkerPool(parents.threads(), parents.cpus_);
}

std::optional<std::vector<int>> WorkerPool::cpus() const {
  const MutexLock lock(mutex_);
  return cpus_;
}

std::optional<int> WorkerPool::caller_cpu() const {
  const MutexLock lock(mutex_);
  if (!cpus_) return std::nullopt;
  return (*cpus_)[(threads() - 1) % cpus_->size()];
}

void WorkerPool::set_threads(unsigned count, const std::optional<std::vector<int>>& cpus) {
  if (count == 0) throw std::invalid_argument("set_threads: count is 0, must be at least 1");
  if (cpus) check_usable(*cpus);
  const MutexLock running(running_);
  if (count == threads() && cpus == this->cpus()) return;
  join_workers();
  const MutexLock lock(mutex_);
  threads_ = count;
  cpus_ = cpus;
}

void WorkerPool::shutdown() {
  const MutexLock running(running_);
  join_workers();
}

void WorkerPool::run(std::size_t count, const std::function<void(std::size_t)>& body) {
  Job job{&body, count};
  {
    const MutexLock running(running_);
    run_shared(job);
  }
  if (job.error) std::rethrow_exception(job.error);
}

void WorkerPool::run_now(std::size_t count, const std::function<void(std::size_t)>& body) {
  Job job{&body, count};
  if (count > 1 && running_.try_lock()) {
    const MutexLock running(running_, Held{});
    run_shared(job);
  } else {
    take_part(job);
  }
  if (job.error) std::rethrow_exception(job.error);
}

void WorkerPool::run_shared(Job& job) {
  const bool alone = job.count <= 1 || threads() == 1;
  if (!alone) {
    start_workers();
    {
      const MutexLock lock(mutex_);
      job_ = &job;
      ++jobs_posted_;
    }
    job_posted_.notify_all();
  }
  take_part(job);
  if (!alone) {
    const MutexLock lock(mutex_);
    job_ = nullptr;  // a worker that wakes up only now finds nothing to join
    while (job.helpers != 0) helper_left_.wait(mutex_);
  }
}

void WorkerPool::start_workers() {
  if (workers_.size() + 1 == threads()) return;
  const std::optional<std::vector<int>> cpus = this->cpus();
  while (workers_.size() + 1 < threads()) {
    std::thread& worker =
        workers_.emplace_back(quiet_thread("hetero-worker", [this] { worker_main(); }));
    // The CPUs were usable when they were given. If one was taken away since, the worker runs where
    // the kernel lets it: slower is better than an update that stops half-way.
    if (cpus) run_on(worker.native_handle(), (*cpus)[(workers_.size() - 1) % cpus->size()]);
  }
}

void WorkerPool::join_workers() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
  }
  job_posted_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
  const MutexLock lock(mutex_);
  stopping_ = false;
}

void WorkerPool::worker_main() {
  const MutexLock lock(mutex_);
  std::size_t seen = 0;
  for (;;) {
    while (!stopping_ && (job_ == nullptr || jobs_posted_ == seen)) job_posted_.wait(mutex_);
    if (stopping_) return;
    seen = jobs_posted_;
    Job& job = *job_;
    ++job.helpers;
    {
      const MutexUnlock unlocked(mutex_);
      take_part(job);
    }
    // Under the lock, so that the job is not gone before the notification.
    if (--job.helpers == 0) helper_left_.notify_one();
  }
}

void WorkerPool::take_part(Job& job) {
  const FloatState ieee;
  try {
    for (;;) {
      // Relaxed: mutex_ publishes the job to its helpers, and what they have done to the caller.
      const std::size_t i = job.next.fetch_add(1, std::memory_order_relaxed);
      if (i >= job.count) return;
      (*job.body)(i);
    }
  } catch (...) {
    const MutexLock lock(mutex_);
    if (!job.error) job.error = std::current_exception();
    job.next = job.count;
  }
}

void CallerCpu::follow() {
  const std::optional<int> cpu = WorkerPool::instance().caller_cpu();
  if (cpu == cpu_) return;
  if (!own_) {
    cpu_set_t mask;
    if (sched_getaffinity(0, sizeof mask, &mask) != 0) return;  // it could not be undone
    own_ = mask;
  }
  // As with workers: where the kernel refuses, the thread runs on.
  if (cpu) {
    run_on(pthread_self(), *cpu);
  } else {
    pthread_setaffinity_np(pthread_self(), sizeof *own_, &*own_);
  }
  cpu_ = cpu;
}

}  // namespace hetero
