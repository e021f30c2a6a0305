// The io_uring engine: one ring, submissions from any thread under the mutex, one thread that
// reaps completions. Registered files and buffers are used where the kernel grants them.
#pragma once

#include <liburing.h>

#include <map>
#include <string>
#include <thread>
#include <vector>

#include "block_engine.h"

namespace hetero {

class UringEngine final : public BlockEngine {
 public:
  // Throws std::system_error when the kernel refuses a ring.
  explicit UringEngine(const IoOptions& options);
  std::string kind() const override { return "io_uring"; }
  bool register_memory(void* address, std::size_t nbytes,
                       std::shared_ptr<const void> owner) override;
  void unregister_memory(void* address) override;

 private:
  // A submission entry that was filled and not yet handed to the kernel. Entries are handed over
  // in order, so one that is given up becomes a no-op (`block` is null) instead of going away.
  struct Staged {
    io_uring_sqe* entry;
    Block* block;
  };
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

  int start(Block& block) override;
  std::vector<Refused> flush() override;
  void stop() override;
  int attach_file(int fd) override;
  void detach_file(int slot) override;

  // Gives the kernel what is staged; an errno when it does not take everything.
  int hand_over();
  void reap();
  bool wake_reaper();
  const Piece* piece_of(std::byte* address, std::size_t nbytes) const;
  int update_buffer(unsigned index, void* address, std::size_t nbytes);
  void clear_buffers(const std::vector<Piece>& pieces);

  io_uring ring_;
  int ring_error_ = 0;  // once waiting for completions has failed for good
  std::vector<Staged> staged_;
  std::vector<int> free_files_;               // empty when files cannot be registered
  std::map<std::byte*, Piece> pieces_;        // by address; blocks look here, under mutex_
  std::mutex registering_;                    // before mutex_; covers the next two
  std::vector<unsigned> free_buffers_;        // empty when buffers cannot be registered
  std::map<void*, Registration> registered_;  // by address
  std::thread reaper_;
};

}  // namespace hetero
