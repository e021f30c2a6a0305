#include "io/engines/thread_engine.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>

#include "base/quiet_thread.h"

namespace hetero {

namespace {

constexpr unsigned kMaxThreads = 256;

std::int64_t transfer(const Block& block) {
  const auto offset = static_cast<off_t>(block.rest_offset());
  const int fd = block.file->fd.get();
  const ssize_t done = block.op->kind == IoKind::read
                           ? ::pread(fd, block.rest_address(), block.rest_bytes(), offset)
                           : ::pwrite(fd, block.rest_address(), block.rest_bytes(), offset);
  return done < 0 ? -errno : done;
}

}  // namespace

ThreadEngine::ThreadEngine(const IoOptions& options) : BlockEngine(options) {
  if (options.threads == 0 || options.threads > kMaxThreads) {
    throw std::invalid_argument("threads must be from 1 to " + std::to_string(kMaxThreads) +
                                ", not " + std::to_string(options.threads));
  }
  try {
    for (unsigned i = 0; i < options.threads; ++i) {
      threads_.push_back(quiet_thread("hetero-io", [this] { work(); }));
    }
  } catch (...) {
    stop();
    throw;
  }
}

bool ThreadEngine::register_memory(const Arena& arena) {
  require_own();
  arena.wipe_on_fork(0, arena.nbytes());  // direct transfers pin it as well, one by one
  return false;
}

void ThreadEngine::unregister_memory(const Arena&) { require_own(); }

void ThreadEngine::wake(std::size_t waiting) {
  if (returning_) --waiting;
  for (std::size_t n = std::min(idle_, waiting); n > 0; --n) wanted_.notify_one();
}

void ThreadEngine::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    Block* const block = take();
    if (block == nullptr) {
      if (stopping_) return;
      ++idle_;
      wanted_.wait(lock);
      --idle_;
      continue;
    }
    lock.unlock();
    const std::int64_t result = transfer(*block);
    lock.lock();
    complete(*block, result);
    returning_ = !resting();
    pump();
    returning_ = false;
    rest(lock);
  }
}

void ThreadEngine::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wanted_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

}  // namespace hetero
