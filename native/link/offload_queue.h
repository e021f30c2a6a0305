// Arrays on their way from a GPU to RAM, each of which is copied to a place or added to what is
// there, in a thread of its own.
//
// What is copied as it is goes straight to its place, whole. What is added or converted comes to
// buffers in RAM, part by part: parts are copied while one before them is added. So no more of an
// array than the buffers hold is in memory twice, and no caller has anything to do for a part.
//
// Copies go by functions of CUDA's driver that the caller has found: nothing of CUDA is needed to
// build this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/completion.h"
#include "base/fork.h"
#include "base/thread_annotations.h"
#include "update/update_kind.h"

namespace hetero {

// A copy that a device refused, did not bring to its end, or that was cancelled.
struct CopyError : std::runtime_error {
  CopyError(int error, const std::string& text) : std::runtime_error(text), error(error) {}
  int error;  // errno: ECANCELED, or EIO for what the device says
};

// The driver's functions, with its names and, but for the types of handles, its prototypes. All
// return 0 or an error's number.
struct CudaDriver {
  int (*cuCtxSetCurrent)(void* context);
  int (*cuEventCreate)(void** event, unsigned flags);
  int (*cuEventDestroy_v2)(void* event);
  int (*cuEventRecord)(void* event, void* stream);
  int (*cuEventSynchronize)(void* event);
  int (*cuStreamWaitEvent)(void* stream, void* event, unsigned flags);
  int (*cuMemcpyDtoHAsync_v2)(void* to, std::uint64_t from, std::size_t nbytes, void* stream);
  int (*cuGetErrorString)(int error, const char** text);
};

// Copies in one stream of one context, which end in the order in which they were started. One
// thread uses it; it is destroyed there, when none of its copies is left.
class CudaCopier {
 public:
  CudaCopier(const CudaDriver& driver, std::uintptr_t context, std::uintptr_t stream);
  CudaCopier(const CudaCopier&) = delete;
  CudaCopier& operator=(const CudaCopier&) = delete;
  ~CudaCopier();

  // Starts copying `nbytes`, at least one, when the device's `event` has come (0: at once). Returns
  // the event of the copy's end. Throws CopyError.
  void* start(std::byte* to, const std::byte* from, std::size_t nbytes, std::uintptr_t event);
  // Blocks until the copy of `nbytes` that has this end is done. Called once for each, after which
  // the event is another one's. Throws CopyError.
  void wait(void* end, std::size_t nbytes);

 private:
  void* take_event(std::size_t nbytes);
  // Throws CopyError, for a copy of `nbytes`, if `result` is an error's number.
  void check(int result, std::size_t nbytes) const;

  const CudaDriver driver_;
  void* const context_;
  void* const stream_;
  std::vector<void*> all_events_;
  std::vector<void*> free_events_;  // whose copies have ended; it has room for all
};

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
class OffloadOp : public Completion {
 public:
  explicit OffloadOp(const Offload& offload) : Completion("gradient offload"), offload_(offload) {}

  void wait();  // blocks; throws what kept a part from arriving, or CopyError if it was cancelled

 private:
  friend class OffloadQueue;

  const Offload offload_;
  // The queue's thread's; the waiter reads the error when the operation is done.
  std::size_t begun_ = 0;  // elements whose copies were started
  std::exception_ptr error_;
  bool cancelled_ = false;  // under the queue's mutex
};

// First in, first out: an array is at its place before a later one is added there. (One that goes
// straight to its place may arrive sooner than an earlier one is added; whoever gives two for one
// place waits for the first.)
//
// All members may be called from any thread. After fork() a queue belongs to the parent alone: in
// the child every use throws and close() does nothing.
class OffloadQueue {
 public:
  // `buffers`: `count` of `buffer_bytes`, one after another, which nobody else uses while
  // operations are under way. As many copies are started and not waited for, to keep a link busy
  // while one part is added. Throws std::invalid_argument if there are none, or if they have no
  // room for an element. The others are CudaCopier's. To be made by make_own().
  OffloadQueue(const CudaDriver& driver, std::uintptr_t context, std::uintptr_t stream,
               std::byte* buffers, std::size_t count, std::size_t buffer_bytes);
  ~OffloadQueue() { close(); }
  OffloadQueue(const OffloadQueue&) = delete;
  OffloadQueue& operator=(const OffloadQueue&) = delete;

  bool foreign() const { return fork_.foreign(); }

  // Throws std::runtime_error after close().
  std::shared_ptr<OffloadOp> submit(const Offload& offload) EXCLUDES(mutex_);
  // What is not begun yet is not needed (a device cannot be told to leave out a copy). Nothing if
  // all is; `op` is this queue's.
  void cancel(OffloadOp& op) EXCLUDES(mutex_);
  // Cancels all operations and joins the thread; idempotent.
  void close() EXCLUDES(mutex_, joining_);

 private:
  // Elements [first, first + numel) of an array, on their way.
  struct Part {
    std::shared_ptr<OffloadOp> op;
    void* copied = nullptr;       // the copy's end; null if there is nothing to copy
    std::byte* buffer = nullptr;  // null if it goes to its place
    std::size_t nbytes = 0;
    std::size_t first = 0;
    std::size_t numel = 0;
    bool last = false;
  };

  void work() EXCLUDES(mutex_);
  void start() REQUIRES(mutex_);
  void finish() REQUIRES(mutex_);

  const ForkGuard fork_{"gradient offload", "make a new engine here"};
  std::optional<CudaCopier> copier_;  // the thread's
  std::byte* const buffers_;
  const std::size_t buffer_bytes_;
  Mutex mutex_;
  Condition changed_;  // something to do, for the thread
  std::deque<std::shared_ptr<OffloadOp>> queue_ GUARDED_BY(mutex_);  // not wholly started
  // A ring of the parts that are on their way, of which each may use the buffer of its place.
  std::vector<Part> ahead_ GUARDED_BY(mutex_);
  std::size_t first_ GUARDED_BY(mutex_) = 0;
  std::size_t count_ GUARDED_BY(mutex_) = 0;
  bool stopping_ GUARDED_BY(mutex_) = false;
  Mutex joining_;
  std::thread thread_ GUARDED_BY(joining_);
};

}  // namespace hetero
