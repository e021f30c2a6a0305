// The threads that share the optimizer's and the norms' work. They sleep between runs, so that they
// cost nothing while torch's threads compute.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace hetero {

// A process has one pool. It starts its threads at first use; the caller of run() is one of them.
// After fork() the child has a fresh pool of the same size, on the same CPUs.
class WorkerPool {
 public:
  static WorkerPool& instance();

  // Threads of a run, the caller included. At first the number of CPUs this process may use.
  unsigned threads() const { return threads_.load(std::memory_order_relaxed); }

  // CPUs that the workers, not the callers, are pinned to; none if they are not pinned.
  std::optional<std::vector<int>> cpus() const;

  // `count` threads, the caller included; worker i is pinned to cpus[i % size]. Waits for the run
  // in progress. Throws std::invalid_argument for 0 threads, and for CPUs that this process cannot
  // run on; nothing is changed then.
  void set_threads(unsigned count, const std::optional<std::vector<int>>& cpus = std::nullopt);

  // Joins the workers after the run in progress; the next run starts them again.
  void shutdown();

  // Calls body(i) for every i in [0, count), in no fixed order and on several threads, with IEEE's
  // default floating-point mode. Rethrows the first exception; the indices not yet begun are then
  // left out. Concurrent callers take turns. The body must not call run().
  void run(std::size_t count, const std::function<void(std::size_t)>& body);

 private:
  // One run: a worker that joins it takes indices until none is left.
  struct Job {
    const std::function<void(std::size_t)>* body;
    std::size_t count;
    std::atomic<std::size_t> next{0};
    unsigned helpers = 0;        // workers inside; guarded by mutex_
    std::exception_ptr error{};  // guarded by mutex_
  };

  WorkerPool(unsigned threads, std::optional<std::vector<int>> cpus)
      : threads_(threads), cpus_(std::move(cpus)) {}
  ~WorkerPool() = delete;  // lives as long as the process: at exit a worker may still be parked

  void start_workers();
  void join_workers();
  void worker_main();
  void take_part(Job& job);

  static std::atomic<WorkerPool*> instance_;

  std::atomic<unsigned> threads_;
  std::mutex turn_;                   // held during a run, and to change the set of workers
  std::vector<std::thread> workers_;  // guarded by turn_

  mutable std::mutex mutex_;
  std::optional<std::vector<int>> cpus_;  // guarded by mutex_
  std::condition_variable job_posted_;
  std::condition_variable helper_left_;
  Job* job_ = nullptr;
  std::size_t jobs_posted_ = 0;  // tells a worker a new job from the one it has just left
  bool stopping_ = false;
};

}  // namespace hetero
