// The io_uring engine: one ring and one thread, which alone submits to it and reaps from it. Blocks
// are left for that thread, which is woken by a bell if it waits for completions. So threads that
// compute are not interrupted by completions, one system call both submits and waits, and the
// mutex is not held during it. Registered buffers are used where the kernel grants them.
#pragma once

#include <liburing.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "io/engines/block_engine.h"

namespace hetero {

class UringEngine final : public BlockEngine {
 public:
  // Throws std::system_error when the kernel refuses a ring, std::invalid_argument when
  // HETERO_URING_SETUP in the environment is not "defer", "coop" or "plain".
  explicit UringEngine(const IoOptions& options);
  std::string kind() const override { return "io_uring"; }
  bool register_memory(const Arena& arena) override;
  void unregister_memory(const Arena& arena) override;

 private:
  // A part of registered memory, as large as one entry of the kernel's table may be.
  struct Piece {
    std::byte* begin;
    std::size_t nbytes;
    unsigned index;
  };
  struct Registration {
    std::shared_ptr<const void> owner;
    std::vector<Piece> pieces;
  };
  // A call that only the ring's thread may make.
  struct Errand {
    std::function<int()> run;
    int result = 0;
    bool done = false;
  };

  void wake(std::size_t waiting) override;
  void stop() override;

  // The ring's thread. reap(), prepare() and do_errand() need mutex_.
  void work();
  void reap();
  void arm_bell();
  void prepare(Block& block);
  void do_errand(std::unique_lock<std::mutex>& lock);

  void ring_bell();
  // What `run` returns in the ring's thread; ECANCELED when that has ended.
  int in_ring_thread(std::function<int()> run);
  const Piece* piece_of(std::byte* address, std::size_t nbytes) const;
  int update_buffer(unsigned index, void* address, std::size_t nbytes);
  void clear_buffers(const std::vector<Piece>& pieces);

  io_uring ring_;
  ParentFd ring_fd_;                    // as ring_ has it; stop() closes it
  bool registers_ = false;              // the kernel has given a table for buffers
  ParentFd bell_;                       // an eventfd, read through the ring
  std::uint64_t rung_ = 0;              // where that goes
  bool bell_armed_ = false;             // the read is in flight
  bool asleep_ = false;                 // nobody has rung since the thread went to wait
  bool stopping_ = false;               // with mutex_, as those above and below
  Errand* errand_ = nullptr;            // one at a time, under registering_
  std::condition_variable done_;        // the errand is, or the thread has ended
  std::map<std::byte*, Piece> pieces_;  // by address; blocks look here, under mutex_
  std::mutex registering_;              // before mutex_; covers the next two
  std::vector<unsigned> free_buffers_;
  std::map<void*, Registration> registered_;  // by address
  std::thread thread_;
};

}  // namespace hetero
