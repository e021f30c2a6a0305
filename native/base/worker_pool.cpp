#include "base/worker_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <stdexcept>

#include "base/float_state.h"
#include "base/quiet_thread.h"

namespace hetero {

namespace {

unsigned allowed_cpus() {
  cpu_set_t mask;
  // It fails if there are more CPUs than cpu_set_t has bits.
  if (sched_getaffinity(0, sizeof mask, &mask) == 0) return static_cast<unsigned>(CPU_COUNT(&mask));
  return std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace

std::atomic<WorkerPool*> WorkerPool::instance_{nullptr};

WorkerPool& WorkerPool::instance() {
  // The pool is replaced in a forked child, where the parent's workers do not exist and its locks
  // may be held by nobody; the old object is left alone for ever.
  static const bool made = [] {
    instance_ = new WorkerPool(allowed_cpus());
    pthread_atfork(nullptr, nullptr, in_child);
    return true;
  }();
  static_cast<void>(made);
  return *instance_;
}

void WorkerPool::in_child() { instance_ = new WorkerPool(instance_.load()->threads()); }

void WorkerPool::set_threads(unsigned count) {
  if (count == 0) throw std::invalid_argument("set_threads: count is 0, must be at least 1");
  const MutexLock workers(workers_mutex_);
  if (count == threads()) return;
  join_workers();
  threads_ = count;
}

void WorkerPool::shutdown() {
  const MutexLock workers(workers_mutex_);
  join_workers();
}

void WorkerPool::run(std::size_t count, const std::function<void(std::size_t)>& body) {
  if (count == 0) return;
  const auto job = std::make_shared<Job>(count, [&body](std::size_t i) { body(i); });
  const std::size_t first = *job->take();  // the caller's, for which no worker is woken
  if (count > 1) post(job);
  job->call(first);
  while (job->make_one_call()) {
  }
  job->wait();
}

void WorkerPool::post(std::shared_ptr<Job> job) {
  if (job->count_ == 0) return job->end(0);
  start();
  std::size_t workers = 0;
  {
    const MutexLock lock(mutex_);
    if (threads() > 1) jobs_.push_back(std::move(job));
    workers = workers_to_wake();
  }
  wake(workers);
}

std::size_t WorkerPool::start() {
  const MutexLock workers(workers_mutex_);
  if (workers_.size() + 1 == threads()) return workers_.size() + 1;
  workers_.reserve(threads() - 1);
  while (workers_.size() + 1 < threads()) {
    try {
      workers_.push_back(quiet_thread("hetero-worker", [this] { worker_main(); }));
    } catch (const NoMoreThreads&) {
      break;  // those that run, or the caller alone, compute everything
    }
  }
  return workers_.size() + 1;
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

// How many workers are to be woken now. A post wakes two, and each of those two more, as long as
// there is an index for each: so that hundreds are awake after a few wake-ups one after the other,
// and none is woken for nothing.
std::size_t WorkerPool::workers_to_wake() {
  std::size_t left = 0;
  const std::size_t enough = woken_ + 2;
  for (const std::shared_ptr<Job>& job : jobs_) {
    left += job->left();
    if (left >= enough) break;
  }
  const std::size_t workers =
      std::min({left - std::min(left, woken_), sleeping_ - woken_, std::size_t{2}});
  woken_ += workers;
  return workers;
}

void WorkerPool::wake(std::size_t workers) {
  for (; workers > 0; --workers) job_posted_.notify_one();
}

void WorkerPool::worker_main() {
  const MutexLock lock(mutex_);
  while (!stopping_) {
    auto taken = take();
    if (!taken) {
      ++sleeping_;
      job_posted_.wait(mutex_);
      --sleeping_;
      if (woken_ > 0) --woken_;
      continue;
    }
    const std::size_t workers = workers_to_wake();
    const MutexUnlock unlocked(mutex_);
    wake(workers);
    const std::shared_ptr<Job> job = std::move(taken->first);
    for (std::optional<std::size_t> i = taken->second; i; i = job->take()) {
      job->call(*i);
    }
  }
}

std::optional<std::pair<std::shared_ptr<Job>, std::size_t>> WorkerPool::take() {
  for (; !jobs_.empty(); jobs_.pop_front()) {
    if (const auto i = jobs_.front()->take()) return std::pair(jobs_.front(), *i);
  }
  return std::nullopt;
}

Job::Job(std::size_t count, std::function<void(std::size_t)> body,
         std::function<void(std::exception_ptr)> ended)
    : Completion("run of the worker pool"),
      count_(count),
      body_(std::move(body)),
      ended_(std::move(ended)),
      unended_(count) {}

// Relaxed, here and in take(): the queue's mutex publishes the job to workers, and unended_ what
// they have done to whoever ends it.
std::size_t Job::left() const {
  return count_ - std::min(count_, next_.load(std::memory_order_relaxed));
}

// (Looks first, so that threads which find none again and again do not write to it.)
std::optional<std::size_t> Job::take() {
  if (left() == 0) return std::nullopt;
  const std::size_t i = next_.fetch_add(1, std::memory_order_relaxed);
  return i < count_ ? std::optional(i) : std::nullopt;
}

bool Job::make_one_call() {
  const std::optional<std::size_t> i = take();
  if (i) call(*i);
  return i.has_value();
}

void Job::wait() {
  wait_done();
  if (error_) std::rethrow_exception(std::move(error_));
}

void Job::call(std::size_t i) {
  std::size_t ended = 1;
  try {
    const FloatState ieee;
    body_(i);
  } catch (...) {
    if (!failed_.exchange(true)) error_ = std::current_exception();
    ended += count_ - std::min(count_, next_.exchange(count_));  // the others are left out
  }
  end(ended);
}

// Acquire and release: who ends the last one sees what all calls have written.
void Job::end(std::size_t indices) {
  if (unended_.fetch_sub(indices, std::memory_order_acq_rel) != indices) return;
  if (ended_) ended_(std::move(error_));
  settle();
}

}  // namespace hetero
