#include "io/engines/uring_engine.h"

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "base/quiet_thread.h"
#include "memory/huge_page.h"

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

constexpr unsigned kBufferSlots = 4096;
constexpr std::size_t kPieceBytes = std::size_t{1} << 30;  // the kernel's limit for one buffer

// The completion of the bell; blocks use their slot's number.
constexpr std::uint64_t kBell = ~std::uint64_t{0};

// A submission refused for want of resources is tried again for about a second.
constexpr unsigned kSubmitTries = 1000;
constexpr std::chrono::milliseconds kSubmitPause{1};

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
    throw std::system_error(-rc, std::generic_category(),
                            "the kernel refuses io_uring (use the \"threads\" engine)");
  }
  return ring.ring_fd;
}

// The piece that begins registered memory of `nbytes`. What ends in less than a huge page is a
// piece of its own: the kernel keeps a buffer in large units only if all its pages are of one size,
// and transfers of a buffer in small units are slower (measured: 5 % to 7 %).
std::size_t first_piece_bytes(std::size_t nbytes) {
  const std::size_t whole = nbytes - nbytes % kHugePageBytes;
  return whole == 0 ? nbytes : std::min(kPieceBytes, whole);
}

}  // namespace

UringEngine::UringEngine(const IoOptions& options)
    : BlockEngine(options),
      // One entry more than blocks, for the bell: an entry is never missing.
      ring_fd_(open_ring(ring_, options.queue_depth + 1)),
      bell_(::eventfd(0, EFD_CLOEXEC)) {
  // A child must not submit to its parent's ring.
  io_uring_ring_dontfork(&ring_);
  if (const int rc = io_uring_register_buffers_sparse(&ring_, kBufferSlots); rc < 0) {
    note("registered buffers refused: " + reason(-rc));
  } else {
    registers_ = true;
    for (unsigned index = kBufferSlots; index-- > 0;) free_buffers_.push_back(index);
  }
  try {
    if (bell_.get() < 0) throw std::system_error(errno, std::generic_category(), "no eventfd");
    thread_ = quiet_thread("hetero-uring", [this] { work(); });
  } catch (...) {
    ring_fd_.release();
    io_uring_queue_exit(&ring_);
    throw;
  }
}

void UringEngine::wake(std::size_t) {
  if (!asleep_) return;  // it looks for blocks before it waits
  asleep_ = false;
  ring_bell();
}

void UringEngine::ring_bell() {
  const std::uint64_t once = 1;
  // Fails only if the counter is full, and then it has been rung.
  [[maybe_unused]] const ssize_t written = ::write(bell_.get(), &once, sizeof once);
}

void UringEngine::work() {
  int rc = (ring_.flags & IORING_SETUP_R_DISABLED) != 0 ? io_uring_enable_rings(&ring_) : 0;
  for (unsigned tries = 0; rc >= 0 || tries < kSubmitTries;) {
    {
      std::unique_lock lock(mutex_);
      asleep_ = false;
      reap();
      rest(lock);
      do_errand(lock);
      if (stopping_) {
        lock.unlock();
        // What has inherited the ring may keep it: its pins must not outlive this.
        if (registers_) io_uring_unregister_buffers(&ring_);
        return;
      }
      arm_bell();
      while (Block* const block = take()) prepare(*block);
      asleep_ = true;
    }
    rc = io_uring_submit_and_wait(&ring_, 1);
    if (rc >= 0 || rc == -EINTR) {
      tries = 0;
      rc = 0;
    } else if (rc == -EAGAIN || rc == -EBUSY || rc == -ENOMEM) {
      ++tries;
      std::this_thread::sleep_for(kSubmitPause);
    } else {
      break;
    }
  }
  // Nothing will be heard of what is in flight: fail it rather than let its waiters hang.
  const std::lock_guard lock(mutex_);
  lose(-rc);
  done_.notify_all();
}

void UringEngine::reap() {
  io_uring_cqe* completion = nullptr;
  unsigned head, seen = 0;
  io_uring_for_each_cqe(&ring_, head, completion) {
    ++seen;
    if (completion->user_data == kBell) {
      bell_armed_ = false;
    } else {
      complete(block(completion->user_data), completion->res);
    }
  }
  io_uring_cq_advance(&ring_, seen);
}

void UringEngine::arm_bell() {
  if (bell_armed_) return;
  io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
  io_uring_prep_read(entry, bell_.get(), &rung_, sizeof rung_, 0);
  io_uring_sqe_set_data64(entry, kBell);
  bell_armed_ = true;
}

void UringEngine::prepare(Block& block) {
  io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
  const int fd = block.file->fd.get();
  const auto nbytes = static_cast<unsigned>(block.rest_bytes());
  std::byte* const address = block.rest_address();
  const Piece* piece = piece_of(address, nbytes);
  const bool read = block.op->kind == IoKind::read;
  if (piece != nullptr) {
    const auto index = static_cast<int>(piece->index);
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
  io_uring_sqe_set_data64(entry, block.slot);
}

void UringEngine::do_errand(std::unique_lock<std::mutex>& lock) {
  if (errand_ == nullptr) return;
  Errand& errand = *std::exchange(errand_, nullptr);
  lock.unlock();
  errand.result = errand.run();
  lock.lock();
  errand.done = true;
  done_.notify_all();
}

int UringEngine::in_ring_thread(std::function<int()> run) {
  Errand errand{std::move(run)};
  std::unique_lock lock(mutex_);
  if (stopping_ || lost()) return ECANCELED;
  errand_ = &errand;
  asleep_ = false;
  ring_bell();
  done_.wait(lock, [&] { return errand.done || lost(); });
  errand_ = nullptr;
  return errand.done ? errand.result : ECANCELED;
}

void UringEngine::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    ring_bell();
  }
  thread_.join();
  const std::lock_guard lock(registering_);
  ring_fd_.release();
  io_uring_queue_exit(&ring_);
  bell_.reset();
  registered_.clear();
}

const UringEngine::Piece* UringEngine::piece_of(std::byte* address, std::size_t nbytes) const {
  auto next = pieces_.upper_bound(address);
  if (next == pieces_.begin()) return nullptr;
  const Piece& piece = std::prev(next)->second;
  const auto into = static_cast<std::size_t>(address - piece.begin);
  return into < piece.nbytes && nbytes <= piece.nbytes - into ? &piece : nullptr;
}

int UringEngine::update_buffer(unsigned index, void* address, std::size_t nbytes) {
  return in_ring_thread([&] {
    const iovec part{address, nbytes};
    const int rc = io_uring_register_buffers_update_tag(&ring_, index, &part, nullptr, 1);
    return rc < 0 ? -rc : 0;
  });
}

void UringEngine::clear_buffers(const std::vector<Piece>& pieces) {
  for (const Piece& piece : pieces) {
    update_buffer(piece.index, nullptr, 0);
    free_buffers_.push_back(piece.index);
  }
}

bool UringEngine::register_memory(const Arena& arena) {
  require_own();
  // Before the kernel pins the pages, and also if it refuses: direct transfers pin them one by one.
  arena.wipe_on_fork(0, arena.nbytes());
  std::byte* const address = arena.address();
  const std::size_t nbytes = arena.nbytes();
  const std::lock_guard registering(registering_);
  {
    const std::lock_guard lock(mutex_);
    require_open();
  }
  if (!registers_) return false;  // noted by the constructor
  if (registered_.contains(address)) return true;
#ifdef MADV_POPULATE_WRITE
  // Pinning populates as well, but in the ring's thread, which has transfers to look after.
  ::madvise(address, nbytes, MADV_POPULATE_WRITE);
#endif
  std::vector<Piece> pieces;
  for (std::size_t done = 0; done < nbytes;) {
    if (free_buffers_.empty()) {
      clear_buffers(pieces);
      const std::lock_guard lock(mutex_);
      note("registered buffers refused for " + std::to_string(nbytes) + " bytes: no free entries");
      return false;
    }
    const Piece piece{address + done, first_piece_bytes(nbytes - done), free_buffers_.back()};
    if (const int error = update_buffer(piece.index, piece.begin, piece.nbytes)) {
      clear_buffers(pieces);
      const std::lock_guard lock(mutex_);
      note("registered buffers refused for " + std::to_string(nbytes) + " bytes: " + reason(error) +
           "; the locked-memory limit (ulimit -l) is " + memlock_limit());
      return false;
    }
    free_buffers_.pop_back();
    pieces.push_back(piece);
    done += piece.nbytes;
  }
  const std::lock_guard lock(mutex_);
  for (const Piece& piece : pieces) pieces_.emplace(piece.begin, piece);
  registered_.emplace(address, Registration{arena.pin(), std::move(pieces)});
  return true;
}

void UringEngine::unregister_memory(const Arena& arena) {
  require_own();
  const std::lock_guard registering(registering_);
  const auto found = registered_.find(arena.address());
  if (found == registered_.end()) return;
  {
    std::unique_lock lock(mutex_);
    for (const Piece& piece : found->second.pieces) pieces_.erase(piece.begin);
    wait_for_earlier(lock);
  }
  clear_buffers(found->second.pieces);
  registered_.erase(found);
}

}  // namespace hetero
