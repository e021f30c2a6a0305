// The threads that share the optimizer's and the norms' work. They sleep between runs, so that they
// cost nothing while torch's threads compute.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <functional>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/thread_annotations.h"

namespace hetero {

// A process has one pool. It starts its threads at first use; the caller of run() is one of them.
// After fork() the child has a fresh pool of the same size, on the same CPUs.
class WorkerPool {
 public:
  static WorkerPool& instance();

  // Threads of a run, the caller included. At first usable_cpus(). (Relaxed: a number that says
  // nothing about other memory.)
  unsigned threads() const { return threads_.load(std::memory_order_relaxed); }

  // The CPUs that set_threads() was given; none if threads run where the kernel lets them.
  std::optional<std::vector<int>> cpus() const EXCLUDES(mutex_);

  // `count` threads, the caller included. Worker i runs on cpus[i % size] alone; cpus[(count - 1) %
  // size] is for callers (CallerCpu). Waits for the run in progress. Throws std::invalid_argument
  // for 0 threads, and for CPUs that this process cannot run on; nothing is changed then.
  void set_threads(unsigned count, const std::optional<std::vector<int>>& cpus = std::nullopt)
      EXCLUDES(running_, mutex_);

  // Joins the workers after the run in progress; the next run starts them again.
  void shutdown() EXCLUDES(running_, mutex_);

  // Calls body(i) for every i in [0, count), in no fixed order and on several threads, with IEEE's
  // default floating-point mode. Rethrows the first exception; the indices not yet begun are then
  // left out. Concurrent callers take turns. The body must not call run().
  void run(std::size_t count, const std::function<void(std::size_t)>& body)
      EXCLUDES(running_, mutex_);

  // As run(), but it does not wait for another caller's turn to end: the calling thread does all
  // then.
  void run_now(std::size_t count, const std::function<void(std::size_t)>& body)
      EXCLUDES(running_, mutex_);

 private:
  friend class CallerCpu;

  // One run: a worker that joins it takes indices until none is left. `helpers` (the workers
  // inside) and `error` are guarded by mutex_.
  struct Job {
    const std::function<void(std::size_t)>* body;
    std::size_t count;
    std::atomic<std::size_t> next{0};
    unsigned helpers = 0;
    std::exception_ptr error{};
  };

  WorkerPool(unsigned threads, std::optional<std::vector<int>> cpus)
      : threads_(threads), cpus_(std::move(cpus)) {}
  ~WorkerPool() = delete;  // lives as long as the process: at exit a worker may still be parked

  // A fork takes the lock of the pool that the process has then (a child's is not its parent's), so
  // that the child reads no half-changed list of CPUs. (From one function to the other, which the
  // analysis cannot follow.)
  static void before_fork() NO_THREAD_SAFETY_ANALYSIS;
  static void after_fork() NO_THREAD_SAFETY_ANALYSIS;
  static void in_child() NO_THREAD_SAFETY_ANALYSIS;

  void run_shared(Job& job) REQUIRES(running_) EXCLUDES(mutex_);
  void start_workers() REQUIRES(running_) EXCLUDES(mutex_);
  void join_workers() REQUIRES(running_) EXCLUDES(mutex_);
  void worker_main() EXCLUDES(mutex_);
  void take_part(Job& job) EXCLUDES(mutex_);
  std::optional<int> caller_cpu() const EXCLUDES(mutex_);

  static std::atomic<WorkerPool*> instance_;

  std::atomic<unsigned> threads_;
  Mutex running_;  // held during a run, and to change the set of workers
  std::vector<std::thread> workers_ GUARDED_BY(running_);

  mutable Mutex mutex_;
  std::optional<std::vector<int>> cpus_ GUARDED_BY(mutex_);
  Condition job_posted_;
  Condition helper_left_;
  Job* job_ GUARDED_BY(mutex_) = nullptr;
  // Tells a worker a new job from the one it has just left.
  std::size_t jobs_posted_ GUARDED_BY(mutex_) = 0;
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

// Keeps a thread that calls run() again and again on the CPU that the pool has for callers.
class CallerCpu {
 public:
  // To be called on that thread before a run: takes over what set_threads() has changed since.
  // Without a CPU for callers the thread runs where it could before the first call.
  void follow();

 private:
  std::optional<int> cpu_;
  std::optional<cpu_set_t> own_;  // where the thread could run before it had a CPU of the pool's
};

}  // namespace hetero
