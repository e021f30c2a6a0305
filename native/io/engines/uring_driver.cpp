// The io_uring driver: one ring and one thread, which alone submits to it and reaps from it. Blocks
// are left for that thread, which is woken by a bell if it waits for completions. So threads that
// compute are not interrupted by completions, one system call both submits and waits, and the
// mutex is not held during it. Registered buffers are used where the kernel grants them.
#include <liburing.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/quiet_thread.h"
#include "io/engines/driver.h"

namespace hetero {

namespace {

// How a ring may be set up, best first; a kernel that does not know one refuses it with EINVAL.
// The thread that submits is the one that waits, so its completions need no interrupt
// (COOP_TASKRUN, Linux 5.19) and may be left until it waits (DEFER_TASKRUN, 6.1, which wants the
// one issuer declared; the ring is enabled by it). IOPOLL is not among them: it refuses files
// without O_DIRECT and devices without poll queues, and keeps a core busy.
struct Setup {
  const char* name;
  unsigned flags;
};
constexpr Setup kSetups[] = {
#ifdef IORING_SETUP_DEFER_TASKRUN
    {"defer", IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_R_DISABLED},
#endif
#ifdef IORING_SETUP_COOP_TASKRUN
    {"coop", IORING_SETUP_COOP_TASKRUN},
#endif
    {"plain", 0},
};

constexpr unsigned kBufferEntries = 4096;
constexpr std::size_t kEntryBytes = std::size_t{1} << 30;  // the kernel's limit for one buffer

// The completion of the bell; blocks use their slot's number.
constexpr std::uint64_t kBell = ~std::uint64_t{0};

// A submission refused for want of resources is tried again for about a second.
constexpr unsigned kSubmitTries = 1000;
constexpr std::chrono::milliseconds kSubmitPause{1};

// Whether to go on after `rc`: the kernel may do later what it refuses now, so after a pause.
bool goes_on(int rc, unsigned& tries) {
  if (rc >= 0 || rc == -EINTR) {
    tries = 0;
    return true;
  }
  if ((rc != -EAGAIN && rc != -EBUSY && rc != -ENOMEM) || ++tries == kSubmitTries) return false;
  std::this_thread::sleep_for(kSubmitPause);
  return true;
}

std::string reason(int error) {
  return std::generic_category().message(error) + " (errno " + std::to_string(error) + ")";
}

std::string memlock_limit() {
  rlimit limit;
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "unknown";
  if (limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return std::to_string(limit.rlim_cur) + " bytes";
}

// The first setup to try: the best one, or for comparisons the one that the environment names.
const Setup* first_setup() {
  // NOLINTNEXTLINE(concurrency-mt-unsafe): nothing here changes the environment
  const char* const wanted = std::getenv("HETERO_URING_SETUP");
  if (wanted == nullptr) return std::begin(kSetups);
  const auto found =
      std::ranges::find(kSetups, std::string(wanted), [](const Setup& s) { return s.name; });
  if (found == std::end(kSetups)) {
    throw std::invalid_argument("HETERO_URING_SETUP is \"" + std::string(wanted) +
                                "\", which is none of this build's defer, coop and plain");
  }
  return found;
}

// Its descriptor.
int open_ring(io_uring& ring, unsigned entries) {
  int rc = -EINVAL;
  for (const Setup* setup = first_setup(); rc == -EINVAL && setup != std::end(kSetups); ++setup) {
    rc = io_uring_queue_init(entries, &ring, setup->flags);
  }
  if (rc < 0) {
    std::string text = "the kernel refuses io_uring (use the \"threads\" engine";
    // Rings are locked memory.
    if (rc == -ENOMEM) {
      text += ", or raise the locked-memory limit, ulimit -l, which is " + memlock_limit();
    }
    throw std::system_error(-rc, std::generic_category(), text + ")");
  }
  return ring.ring_fd;
}

// The size of the entry that begins registered memory of `nbytes`. What ends in less than a huge
// page has an entry of its own: the kernel keeps a buffer in large units only if all its pages are
// of one size, and transfers of a buffer in small units are slower (measured: 5 % to 7 %).
std::size_t first_entry_bytes(std::size_t nbytes) {
  const std::size_t whole = nbytes - nbytes % kHugePageBytes;
  return whole == 0 ? nbytes : std::min(kEntryBytes, whole);
}

class UringDriver final : public Driver {
 public:
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

UringDriver::UringDriver(SharedQueue& shared, const IoOptions& options)
    : shared_(shared),
      // One entry more than blocks, for the bell: an entry is never missing.
      ring_fd_(open_ring(ring_, options.queue_depth + 1)),
      bell_(::eventfd(0, EFD_CLOEXEC)) {
  // A child must not submit to its parent's ring.
  io_uring_ring_dontfork(&ring_);
  try {
    if (bell_.get() < 0) throw std::system_error(errno, std::generic_category(), "no eventfd");
    unsubmitted_.reserve(options.queue_depth + 1);
    if (const int rc = io_uring_register_buffers_sparse(&ring_, kBufferEntries); rc < 0) {
      const MutexLock lock(shared_.mutex);
      shared_.note("registered buffers refused: " + reason(-rc));
    } else {
      registers_ = true;
      const MutexLock registering(registering_);
      for (unsigned index = kBufferEntries; index-- > 0;) free_entries_.push_back(index);
    }
    thread_ = quiet_thread("hetero-uring", [this] { work(); });
  } catch (...) {
    ring_fd_.release();
    io_uring_queue_exit(&ring_);
    throw;
  }
}

void UringDriver::wake(std::size_t) {
  shared_.mutex.assert_held();
  if (!asleep_) return;  // it looks for blocks before it waits
  asleep_ = false;
  ring_bell();
}

void UringDriver::ring_bell() {
  const std::uint64_t once = 1;
  // Fails only if the counter is full, and then it has been rung.
  [[maybe_unused]] const ssize_t written = ::write(bell_.get(), &once, sizeof once);
}

void UringDriver::work() {
  // If the kernel refuses, so does the first submission, which tells all who wait. (A call of the
  // system's: the shared liburing exports io_uring_enable_rings only since 2.4.)
  if ((ring_.flags & IORING_SETUP_R_DISABLED) != 0) {
    ::syscall(__NR_io_uring_register, ring_fd_.get(), IORING_REGISTER_ENABLE_RINGS, nullptr, 0);
  }
  unsigned tries = 0;
  int rc = 0;
  do {
    if (!prepare_all()) {
      // Whoever has inherited the ring may keep it: its page locks must not outlive this.
      if (registers_) io_uring_unregister_buffers(&ring_);
      return;
    }
    rc = io_uring_submit_and_wait(&ring_, 1);
    if (rc > 0) unsubmitted_.erase(unsubmitted_.begin(), unsubmitted_.begin() + rc);
  } while (goes_on(rc, tries));
  lose(-rc);
}

bool UringDriver::prepare_all() {
  const MutexLock lock(shared_.mutex);
  asleep_ = false;
  reap();
  if (Block* const resting = shared_.queue.begin_pause()) shared_.pause(resting);
  do_errand();
  if (stopping_) return false;
  arm_bell();
  while (Block* const block = shared_.queue.take()) prepare(*block);
  asleep_ = true;
  return true;
}

void UringDriver::lose(int error) {
  {
    const MutexLock lock(shared_.mutex);
    shared_.queue.lose(error);
    // What the kernel was never given fails at once; to the rest it may still write.
    for (const std::uint64_t user_data : unsubmitted_) {
      if (user_data != kBell) shared_.queue.complete(shared_.queue.block(user_data), -error);
    }
    errand_done_.notify_all();
  }
  // Waiting submits nothing, so the kernel needs nothing for it that it could be short of.
  io_uring_cqe* completion = nullptr;
  unsigned tries = 0;
  do {
    const MutexLock lock(shared_.mutex);
    reap();
    if (shared_.queue.transferring() == 0) {
      if (registers_) io_uring_unregister_buffers(&ring_);  // as in work()
      return;
    }
  } while (goes_on(io_uring_wait_cqe(&ring_, &completion), tries));
  const MutexLock lock(shared_.mutex);
  shared_.queue.abandon(error);
}

void UringDriver::reap() {
  io_uring_cqe* completion = nullptr;
  unsigned head, seen = 0;
  io_uring_for_each_cqe(&ring_, head, completion) {
    ++seen;
    if (completion->user_data == kBell) {
      bell_armed_ = false;
    } else {
      shared_.queue.complete(shared_.queue.block(completion->user_data), completion->res);
    }
  }
  io_uring_cq_advance(&ring_, seen);
}

io_uring_sqe* UringDriver::next_entry(std::uint64_t user_data) {
  io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
  unsubmitted_.push_back(user_data);
  return entry;
}

void UringDriver::arm_bell() {
  if (bell_armed_) return;
  io_uring_sqe* const entry = next_entry(kBell);
  io_uring_prep_read(entry, bell_.get(), &rung_, sizeof rung_, 0);
  io_uring_sqe_set_data64(entry, kBell);
  bell_armed_ = true;
}

void UringDriver::prepare(Block& block) {
  io_uring_sqe* const entry = next_entry(block.index);
  const int fd = block.file->fd.get();
  const auto nbytes = static_cast<unsigned>(block.rest_bytes());
  std::byte* const address = block.rest_address();
  const BufferEntry* const buffer = buffer_of(address, nbytes);
  const bool read = block.op->kind == IoKind::read;
  if (buffer != nullptr) {
    const auto index = static_cast<int>(buffer->index);
    if (read) {
      io_uring_prep_read_fixed(entry, fd, address, nbytes, block.rest_offset(), index);
    } else {
      io_uring_prep_write_fixed(entry, fd, address, nbytes, block.rest_offset(), index);
    }
  } else if (read) {
    io_uring_prep_read(entry, fd, address, nbytes, block.rest_offset());
  } else {
    io_uring_prep_write(entry, fd, address, nbytes, block.rest_offset());
  }
  io_uring_sqe_set_data64(entry, block.index);
}

void UringDriver::do_errand() {
  if (errand_ == nullptr) return;
  Errand& errand = *std::exchange(errand_, nullptr);
  {
    const MutexUnlock unlocked(shared_.mutex);
    errand.result = errand.run();
  }
  errand.done = true;
  errand_done_.notify_all();
}

int UringDriver::in_ring_thread(std::function<int()> run) {
  Errand errand{std::move(run)};
  const MutexLock lock(shared_.mutex);
  if (stopping_ || shared_.queue.lost()) return ECANCELED;
  errand_ = &errand;
  asleep_ = false;
  ring_bell();
  while (!errand.done && !shared_.queue.lost()) errand_done_.wait(shared_.mutex);
  errand_ = nullptr;
  return errand.done ? errand.result : ECANCELED;
}

void UringDriver::stop() {
  {
    const MutexLock lock(shared_.mutex);
    stopping_ = true;
    ring_bell();
  }
  thread_.join();
  const MutexLock lock(registering_);
  ring_fd_.release();
  io_uring_queue_exit(&ring_);
  bell_.reset();
  registered_.clear();
}

const UringDriver::BufferEntry* UringDriver::buffer_of(std::byte* address,
                                                       std::size_t nbytes) const {
  auto next = buffers_.upper_bound(address);
  if (next == buffers_.begin()) return nullptr;
  const BufferEntry& buffer = std::prev(next)->second;
  const auto into = static_cast<std::size_t>(address - buffer.begin);
  return into < buffer.nbytes && nbytes <= buffer.nbytes - into ? &buffer : nullptr;
}

int UringDriver::update_entry(unsigned index, void* address, std::size_t nbytes) {
  return in_ring_thread([&] {
    const iovec part{address, nbytes};
    const int rc = io_uring_register_buffers_update_tag(&ring_, index, &part, nullptr, 1);
    return rc < 0 ? -rc : 0;
  });
}

void UringDriver::clear_entries(const std::vector<BufferEntry>& entries) {
  for (const BufferEntry& entry : entries) {
    update_entry(entry.index, nullptr, 0);
    free_entries_.push_back(entry.index);
  }
}

bool UringDriver::register_memory(const Arena& arena) {
  const MutexLock registering(registering_);
  if (!registers_) return false;  // noted by the constructor
  std::byte* const address = arena.address();
  const std::size_t nbytes = arena.nbytes();
  if (registered_.contains(address)) return true;
#ifdef MADV_POPULATE_WRITE
  // Pinning populates as well, but in the ring's thread, which has transfers to look after.
  ::madvise(address, nbytes, MADV_POPULATE_WRITE);
#endif
  std::vector<BufferEntry> entries;
  for (std::size_t done = 0; done < nbytes;) {
    std::string refusal = "no free entries";
    if (!free_entries_.empty()) {
      const BufferEntry entry{address + done, first_entry_bytes(nbytes - done),
                              free_entries_.back()};
      const int error = update_entry(entry.index, entry.begin, entry.nbytes);
      if (error == 0) {
        free_entries_.pop_back();
        entries.push_back(entry);
        done += entry.nbytes;
        continue;
      }
      refusal = reason(error) + "; the locked-memory limit (ulimit -l) is " + memlock_limit();
    }
    clear_entries(entries);
    const MutexLock lock(shared_.mutex);
    shared_.note("registered buffers refused for " + std::to_string(nbytes) + " bytes: " + refusal);
    return false;
  }
  const MutexLock lock(shared_.mutex);
  for (const BufferEntry& entry : entries) buffers_.emplace(entry.begin, entry);
  registered_.emplace(address, Registration{arena.hold_pages(), std::move(entries)});
  return true;
}

void UringDriver::unregister_memory(const Arena& arena) {
  const MutexLock registering(registering_);
  const auto found = registered_.find(arena.address());
  if (found == registered_.end()) return;
  {
    const MutexLock lock(shared_.mutex);
    for (const BufferEntry& entry : found->second.entries) buffers_.erase(entry.begin);
    const std::uint64_t end = shared_.queue.next_serial();
    while (shared_.queue.uses(arena.address(), arena.nbytes(), end)) {
      shared_.settled.wait(shared_.mutex);
    }
  }
  clear_entries(found->second.entries);
  registered_.erase(found);
}

}  // namespace

std::unique_ptr<Driver> make_uring_driver(SharedQueue& shared, const IoOptions& options) {
  return std::make_unique<UringDriver>(shared, options);
}

}  // namespace hetero
