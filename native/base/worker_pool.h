// The threads that share the optimizer's and the norms' work. They sleep when there is none, so
// that they cost nothing while torch's threads compute.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/completion.h"
#include "base/thread_annotations.h"

namespace hetero {

// Calls body(i) once for every i in [0, count), in no fixed order and on several threads, with
// IEEE's default floating-point mode. After the first exception the indices not yet begun are left
// out.
class Job : public Completion {
 public:
  // `ended` is called with the first exception, or null, on the thread that ends the last call. It
  // must not throw, nor use the pool.
  Job(std::size_t count, std::function<void(std::size_t)> body,
      std::function<void(std::exception_ptr)> ended = nullptr);

  // How many indices no thread has taken; may be outdated at once, and is then too large.
  std::size_t left() const;

  // Takes an index and makes its call; false if none is left.
  bool make_one_call();

 private:
  friend class WorkerPool;

  std::optional<std::size_t> take();
  void call(std::size_t i);
  void end(std::size_t indices);
  // Blocks until the last call has ended. Rethrows the first exception, unless `ended` had it.
  void wait();

  const std::size_t count_;
  const std::function<void(std::size_t)> body_;
  const std::function<void(std::exception_ptr)> ended_;
  std::atomic<std::size_t> next_{0};  // not taken yet; past count_ when none is
  std::atomic<std::size_t> unended_;  // indices whose calls have not ended
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;  // written by the thread that sets failed_, read at the end
};

// A process has one pool. It starts its threads at first use; whoever waits for a job is one of
// them. After fork() the child has a fresh pool of the same size.
//
// Jobs are in one queue. A worker takes indices of the oldest job that has any left, so it goes on
// to the next job while others still compute the last indices of this one.
class WorkerPool {
 public:
  static WorkerPool& instance();

  // Threads of a run, the caller included. At first as many as the CPUs that the process may run
  // on. (Relaxed: a number that says nothing about other memory.)
  unsigned threads() const { return threads_.load(std::memory_order_relaxed); }

  // `count` threads, the caller included. Waits for the jobs that workers are at. Throws
  // std::invalid_argument for 0 threads.
  void set_threads(unsigned count) EXCLUDES(workers_mutex_, mutex_);

  // Starts the workers, as the next job would; returns how many threads a run has then, the caller
  // included: fewer than threads() if the system has no room for more.
  std::size_t start() EXCLUDES(workers_mutex_, mutex_);

  // Joins the workers after the jobs that they are at; the next job starts them again.
  void shutdown() EXCLUDES(workers_mutex_, mutex_);

  // Calls body(i) for every i in [0, count) as a job and waits for its end; the caller takes part.
  // Rethrows the first exception. The body must not call run().
  void run(std::size_t count, const std::function<void(std::size_t)>& body)
      EXCLUDES(workers_mutex_, mutex_);

  // Puts the job behind those that are queued, and returns. There may be no workers: whoever posts
  // a job sees to its end by make_one_call(). If this throws, no call was made.
  void post(std::shared_ptr<Job> job) EXCLUDES(workers_mutex_, mutex_);

 private:
  explicit WorkerPool(unsigned threads) : threads_(threads) {}
  ~WorkerPool() = delete;  // lives as long as the process: at exit a worker may still be parked

  static void in_child();

  void join_workers() REQUIRES(workers_mutex_) EXCLUDES(mutex_);
  void worker_main() EXCLUDES(mutex_);
  // The oldest job with an index left, and that index; none, and the queue is empty then, if no job
  // has.
  std::optional<std::pair<std::shared_ptr<Job>, std::size_t>> take() REQUIRES(mutex_);
  std::size_t workers_to_wake() REQUIRES(mutex_);
  void wake(std::size_t workers) EXCLUDES(mutex_);

  static std::atomic<WorkerPool*> instance_;

  std::atomic<unsigned> threads_;
  Mutex workers_mutex_;  // held to change the set of workers
  std::vector<std::thread> workers_ GUARDED_BY(workers_mutex_);

  Mutex mutex_;
  std::deque<std::shared_ptr<Job>> jobs_ GUARDED_BY(mutex_);  // oldest first
  Condition job_posted_;
  std::size_t sleeping_ GUARDED_BY(mutex_) = 0;
  std::size_t woken_ GUARDED_BY(mutex_) = 0;  // of those that sleep, still to come
  bool stopping_ GUARDED_BY(mutex_) = false;
};

// What a worker takes at a time: large enough that taking it costs nothing, small enough that the
// threads finish together.
inline constexpr std::size_t kBlockNumel = 64 * 1024;

// Calls body(first, numel) for every block of [0, numel), on the pool.
template <class Body>
void for_blocks(std::size_t numel, Body body) {
  const std::size_t blocks = (numel + kBlockNumel - 1) / kBlockNumel;
  WorkerPool::instance().run(blocks, [&](std::size_t i) {
    const std::size_t first = i * kBlockNumel;
    body(first, std::min(kBlockNumel, numel - first));
  });
}

}  // namespace hetero
