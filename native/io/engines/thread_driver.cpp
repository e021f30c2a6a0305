// The driver that works everywhere: a pool of threads doing pread and pwrite.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>

#include "base/quiet_thread.h"
#include "io/engines/driver.h"

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

ThreadDriver::ThreadDriver(SharedQueue& shared, const IoOptions& options) : shared_(shared) {
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

void ThreadDriver::wake(std::size_t waiting) {
  shared_.mutex.assert_held();
  for (std::size_t n = std::min(idle_, waiting); n > 0; --n) wanted_.notify_one();
}

void ThreadDriver::work() {
  const MutexLock lock(shared_.mutex);
  for (;;) {
    Block* const block = shared_.queue.take();
    if (block == nullptr) {
      if (stopping_) return;
      ++idle_;
      wanted_.wait(shared_.mutex);
      --idle_;
      continue;
    }
    std::int64_t result = 0;
    {
      const MutexUnlock unlocked(shared_.mutex);
      result = transfer(*block);
    }
    shared_.queue.complete(*block, result);
    Block* const resting = shared_.queue.begin_pause();
    // Of what may be taken this thread takes one itself, unless it pauses.
    const std::size_t mine = resting == nullptr ? 1 : 0;
    if (const std::size_t waiting = shared_.queue.waiting(); waiting > mine) wake(waiting - mine);
    if (resting != nullptr) shared_.pause(resting);
  }
}

void ThreadDriver::stop() {
  {
    const MutexLock lock(shared_.mutex);
    stopping_ = true;
  }
  wanted_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

}  // namespace

std::unique_ptr<Driver> make_thread_driver(SharedQueue& shared, const IoOptions& options) {
  return std::make_unique<ThreadDriver>(shared, options);
}

}  // namespace hetero
