// The driver that works everywhere: a pool of threads doing pread and pwrite.
#pragma once

#include <cstddef>
#include <thread>
#include <vector>

#include "io/engines/driver.h"

namespace hetero {

class ThreadDriver final : public Driver {
 public:
  // Throws std::invalid_argument for a number of threads out of range.
  ThreadDriver(SharedQueue& shared, const IoOptions& options);

  void wake(std::size_t waiting) override;
  // There is nothing to register with: false, and the memory is used as it is.
  bool register_memory(const Arena&) override { return false; }
  void unregister_memory(const Arena&) override {}
  void stop() override;

 private:
  void work();

  SharedQueue& shared_;
  Condition wanted_;                                // a block, or the end
  std::size_t idle_ GUARDED_BY(shared_.mutex) = 0;  // threads asleep
  bool stopping_ GUARDED_BY(shared_.mutex) = false;
  std::vector<std::thread> threads_;
};

}  // namespace hetero
