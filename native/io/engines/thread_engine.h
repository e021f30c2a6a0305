// The engine that works everywhere: a pool of threads doing pread and pwrite.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

#include "io/engines/block_engine.h"

namespace hetero {

class ThreadEngine final : public BlockEngine {
 public:
  explicit ThreadEngine(const IoOptions& options);
  std::string kind() const override { return "threads"; }
  // There is nothing to register with: false, and the memory is used as it is.
  bool register_memory(const Arena& arena) override;
  void unregister_memory(const Arena& arena) override;

 private:
  void wake(std::size_t waiting) override;
  void stop() override;
  void work();

  std::condition_variable wanted_;  // with mutex_
  std::size_t idle_ = 0;            // threads asleep
  bool returning_ = false;          // the thread that holds mutex_ will take a block itself
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace hetero
