// The io_uring driver: one ring and one thread, which alone submits to it and reaps from it. Blocks
// are left for that thread, which is woken by a bell if it waits for completions. So threads that
// compute are not interrupted by completions, one system call both submits and waits, and the
// mutex is not held during it. Registered buffers are used where the kernel grants them.
#pragma once

#include <liburing.h>

#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "base/fork.h"
#include "io/engines/driver.h"

namespace hetero {

class UringDriver final : public Driver {
 public:
  // Throws std::system_error when the kernel refuses a ring, std::invalid_argument when
  // HETERO_URING_SETUP in the environment is not "defer", "coop" or "plain".
  UringDriver(SharedQueue& shared, const IoOptions& options);

  void wake(std::size_t waiting) override;
  bool register_memory(const Arena& arena) override;
  void unregister_memory(const Arena& arena) override;
  void stop() override;

 private:
  // One entry of the kernel's table of buffers: registered memory, or a part of it.
  struct BufferEntry {
    std::byte* begin;
    std::size_t nbytes;
    unsigned index;
  };
  struct Registration {
    std::shared_ptr<const void> pages;
    std::vector<BufferEntry> entries;
  };
  // A call that only the ring's thread may make.
  struct Errand {
    std::function<int()> run;
    int result = 0;
    bool done = false;
  };

  // The ring's thread.
  void work();
  // Completes what is back and prepares what waits; false when the thread is to end.
  bool prepare_all();
  void reap() REQUIRES(shared_.mutex);
  void do_errand() REQUIRES(shared_.mutex);
  void arm_bell() REQUIRES(shared_.mutex);
  void prepare(Block& block) REQUIRES(shared_.mutex);
  io_uring_sqe* next_entry(std::uint64_t user_data);
  // Nothing can be submitted any more: waits for what is in flight. All else fails.
  void lose(int error);

  void ring_bell();
  // What `run` returns in the ring's thread; ECANCELED when that has ended.
  int in_ring_thread(std::function<int()> run) REQUIRES(registering_);
  int update_entry(unsigned index, void* address, std::size_t nbytes) REQUIRES(registering_);
  void clear_entries(const std::vector<BufferEntry>& entries) REQUIRES(registering_);
  const BufferEntry* buffer_of(std::byte* address, std::size_t nbytes) const
      REQUIRES(shared_.mutex);

  SharedQueue& shared_;
  io_uring ring_;     // entries and completions are the thread's
  ParentFd ring_fd_;  // as ring_ has it; stop() closes it
  bool registers_ =
      false;       // the kernel has given a table for buffers; set before the thread starts
  ParentFd bell_;  // an eventfd, read through the ring
  std::uint64_t rung_ = 0;  // where that goes
  // The thread's: entries that the kernel has not taken yet, in order; blocks by index, or the
  // bell.
  std::vector<std::uint64_t> unsubmitted_;
  bool bell_armed_ = false;                        // the thread's: the read is in flight
  bool asleep_ GUARDED_BY(shared_.mutex) = false;  // nobody has rung since the thread went to wait
  bool stopping_ GUARDED_BY(shared_.mutex) = false;
  Condition errand_done_;  // or the ring was lost
  Mutex registering_ ACQUIRED_BEFORE(shared_.mutex);
  Errand* errand_ GUARDED_BY(shared_.mutex) = nullptr;  // one at a time, under registering_
  std::map<std::byte*, BufferEntry> buffers_ GUARDED_BY(shared_.mutex);  // by address
  std::vector<unsigned> free_entries_ GUARDED_BY(registering_);
  std::map<void*, Registration> registered_ GUARDED_BY(registering_);  // by address
  std::thread thread_;
};

}  // namespace hetero
