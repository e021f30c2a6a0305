// Arrays on their way from a device to RAM, each of which is copied to a place or added to what is
// there, in a thread of its own.
//
// What is copied as it is goes straight to its place, whole. What is added or converted comes to
// buffers in RAM, part by part: one part is copied while the one before it is added. So nothing of
// an array but its size is in memory twice, and no caller has anything to do for a part.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>

#include "base/completion.h"
#include "base/fork.h"
#include "link/copier.h"
#include "update/update_kind.h"

namespace hetero {

// What is to be done. The memory stays until the operation is done.
struct Offload {
  const std::byte* from = nullptr;  // on the device
  Dtype from_dtype = Dtype::fp32;
  std::byte* to = nullptr;  // in RAM
  Dtype dtype = Dtype::fp32;
  std::size_t numel = 0;
  bool add = false;          // to what is there, in fp32 and rounded once; else in its place
  std::uintptr_t event = 0;  // the device's, after which `from` has its values; 0: it has them

  bool straight() const { return !add && from_dtype == dtype; }
};

// The handle of one array. Shared by the submitter and the queue.
class OffloadOp {
 public:
  explicit OffloadOp(const Offload& offload) : offload_(offload) {}

  bool done() const { return completion_.done(); }
  void wait();  // blocks; throws what kept a part from arriving, or CopyError if it was cancelled

 private:
  friend class OffloadQueue;

  const Offload offload_;
  // The queue's thread's; the waiter reads the error when the operation is done.
  std::size_t begun_ = 0;  // elements whose copies were started
  std::exception_ptr error_;
  bool cancelled_ = false;  // under the queue's mutex
  Completion completion_{"gradient offload"};
};

// First in, first out: an array is at its place before a later one is added there. (One that goes
// straight to its place may arrive sooner than an earlier one is added; whoever gives two for one
// place waits for the first.)
//
// All members may be called from any thread. After fork() a queue belongs to the parent alone: in
// the child every use throws and close() does nothing.
class OffloadQueue {
 public:
  static constexpr std::size_t kBuffers = 2;

  // `buffers`: kBuffers of `buffer_bytes`, one after another, which nobody else uses while
  // operations are under way. Throws std::invalid_argument if they have no room for an element.
  OffloadQueue(std::unique_ptr<Copier> copier, std::byte* buffers, std::size_t buffer_bytes);
  ~OffloadQueue();
  OffloadQueue(const OffloadQueue&) = delete;
  OffloadQueue& operator=(const OffloadQueue&) = delete;

  // Throws std::runtime_error after close().
  std::shared_ptr<OffloadOp> submit(const Offload& offload);
  // What is not copied yet is not needed. Nothing if all is; `op` is this queue's.
  void cancel(OffloadOp& op);
  // cancel(), and waits until the operation is done, however it ends. Nothing in a forked child.
  void abandon(OffloadOp& op) noexcept;
  // Cancels all operations and joins the thread; idempotent.
  void close();

 private:
  class Line;

  const ForkGuard fork_{"gradient offload", "make a new engine here"};
  std::unique_ptr<Line> line_;
};

}  // namespace hetero
