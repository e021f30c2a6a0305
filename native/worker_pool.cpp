#include "worker_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <stdexcept>

#include "float_state.h"
#include "quiet_thread.h"

namespace hetero {
namespace {

unsigned usable_cpus() {
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof mask, &mask) == 0) {
    return static_cast<unsigned>(std::max(1, CPU_COUNT(&mask)));
  }
  // More CPUs than cpu_set_t has bits.
  return std::max(1U, std::thread::hardware_concurrency());
}

}  // namespace

std::atomic<WorkerPool*> WorkerPool::instance_{nullptr};

WorkerPool& WorkerPool::instance() {
  // The pool is replaced in a forked child, where the parent's workers do not exist and its locks
  // may be held by nobody; the old object is left alone for ever.
  static const bool made = [] {
    instance_ = new WorkerPool(usable_cpus());
    pthread_atfork(nullptr, nullptr,
                   [] { instance_ = new WorkerPool(instance_.load()->threads()); });
    return true;
  }();
  static_cast<void>(made);
  return *instance_;
}

void WorkerPool::set_threads(unsigned count) {
  if (count == 0) throw std::invalid_argument("set_threads: count is 0, must be at least 1");
  const std::lock_guard turn(turn_);
  if (count == threads()) return;
  join_workers();
  threads_ = count;
}

void WorkerPool::shutdown() {
  const std::lock_guard turn(turn_);
  join_workers();
}

void WorkerPool::run(std::size_t count, const std::function<void(std::size_t)>& body) {
  const std::lock_guard turn(turn_);
  Job job{&body, count};
  const bool alone = count <= 1 || threads() == 1;
  if (!alone) {
    start_workers();
    {
      const std::lock_guard lock(mutex_);
      job_ = &job;
      ++jobs_posted_;
    }
    job_posted_.notify_all();
  }
  take_part(job);
  if (!alone) {
    std::unique_lock lock(mutex_);
    job_ = nullptr;  // a worker that wakes up only now finds nothing to join
    helper_left_.wait(lock, [&] { return job.helpers == 0; });
  }
  if (job.error) std::rethrow_exception(job.error);
}

void WorkerPool::start_workers() {
  while (workers_.size() + 1 < threads()) {
    workers_.push_back(quiet_thread("hetero-worker", [this] { worker_main(); }));
  }
}

void WorkerPool::join_workers() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  job_posted_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
  const std::lock_guard lock(mutex_);
  stopping_ = false;
}

void WorkerPool::worker_main() {
  std::unique_lock lock(mutex_);
  std::size_t seen = 0;
  for (;;) {
    job_posted_.wait(lock, [&] { return stopping_ || (job_ != nullptr && jobs_posted_ != seen); });
    if (stopping_) return;
    seen = jobs_posted_;
    Job& job = *job_;
    ++job.helpers;
    lock.unlock();
    take_part(job);
    lock.lock();
    // Under the lock, so that the job is not gone before the notification.
    if (--job.helpers == 0) helper_left_.notify_one();
  }
}

void WorkerPool::take_part(Job& job) {
  const FloatState ieee;
  try {
    for (;;) {
      const std::size_t i = job.next.fetch_add(1, std::memory_order_relaxed);
      if (i >= job.count) return;
      (*job.body)(i);
    }
  } catch (...) {
    const std::lock_guard lock(mutex_);
    if (!job.error) job.error = std::current_exception();
    job.next = job.count;
  }
}

}  // namespace hetero
