#include "uring_engine.h"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <utility>

#include "quiet_thread.h"

namespace hetero {

namespace {

constexpr unsigned kFileSlots = 64;
constexpr unsigned kBufferSlots = 4096;
constexpr std::size_t kPieceBytes = std::size_t{1} << 30;  // the kernel's limit for one buffer

// Completions that belong to no block; blocks use their slot's number.
constexpr std::uint64_t kStop = ~std::uint64_t{0};
constexpr std::uint64_t kDropped = kStop - 1;

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

}  // namespace

UringEngine::UringEngine(const IoOptions& options) : BlockEngine(options) {
  // One entry more than blocks, so that there is room for the stop message.
  if (const int rc = io_uring_queue_init(options.queue_depth + 1, &ring_, 0); rc < 0) {
    throw std::system_error(-rc, std::generic_category(),
                            "the kernel refuses io_uring (use the \"threads\" engine)");
  }
  // A child must not submit to its parent's ring.
  io_uring_ring_dontfork(&ring_);
  if (const int rc = io_uring_register_files_sparse(&ring_, kFileSlots); rc < 0) {
    note("registered files refused: " + reason(-rc));
  } else {
    for (int slot = kFileSlots; slot-- > 0;) free_files_.push_back(slot);
  }
  if (const int rc = io_uring_register_buffers_sparse(&ring_, kBufferSlots); rc < 0) {
    note("registered buffers refused: " + reason(-rc));
  } else {
    for (unsigned index = kBufferSlots; index-- > 0;) free_buffers_.push_back(index);
  }
  try {
    reaper_ = quiet_thread("hetero-uring", [this] { reap(); });
  } catch (...) {
    io_uring_queue_exit(&ring_);
    throw;
  }
}

int UringEngine::start(Block& block) {
  if (ring_error_ != 0) return ring_error_;
  io_uring_sqe* entry = io_uring_get_sqe(&ring_);
  if (entry == nullptr) {
    // Full only of entries given up earlier: they go first, if the kernel takes anything again.
    if (const int error = hand_over()) return error;
    entry = io_uring_get_sqe(&ring_);
    if (entry == nullptr) return EBUSY;
  }
  const OpenFile& file = *block.file;
  const int fd = file.fixed_slot >= 0 ? file.fixed_slot : file.fd;
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
  if (file.fixed_slot >= 0) io_uring_sqe_set_flags(entry, IOSQE_FIXED_FILE);
  io_uring_sqe_set_data64(entry, block.slot);
  staged_.push_back({entry, &block});
  return 0;
}

int UringEngine::hand_over() {
  for (unsigned tries = 0; !staged_.empty();) {
    const int rc = io_uring_submit(&ring_);
    if (rc > 0) {
      staged_.erase(staged_.begin(), staged_.begin() + rc);
      tries = 0;
      continue;
    }
    const int error = rc < 0 ? -rc : EAGAIN;
    const bool passing = error == EAGAIN || error == EBUSY || error == EINTR;
    if (!passing || ++tries == kSubmitTries) return error;
    std::this_thread::sleep_for(kSubmitPause);
  }
  return 0;
}

std::vector<BlockEngine::Refused> UringEngine::flush() {
  std::vector<Refused> refused;
  const int error = hand_over();
  if (error == 0) return refused;
  for (Staged& each : staged_) {
    if (each.block == nullptr) continue;
    refused.push_back({each.block, error});
    io_uring_prep_nop(each.entry);
    io_uring_sqe_set_data64(each.entry, kDropped);
    each.block = nullptr;
  }
  return refused;
}

void UringEngine::reap() {
  for (bool stopping = false; !stopping;) {
    io_uring_cqe* completion = nullptr;
    const int rc = io_uring_wait_cqe(&ring_, &completion);
    if (rc == -EINTR || rc == -EAGAIN) continue;
    const std::lock_guard lock(mutex_);
    if (rc < 0) {
      // Nothing will be heard of what is in flight: fail it rather than let its waiters hang.
      ring_error_ = -rc;
      fail_in_flight(ring_error_);
      return;
    }
    unsigned head, seen = 0;
    io_uring_for_each_cqe(&ring_, head, completion) {
      ++seen;
      if (completion->user_data == kStop) {
        stopping = true;
      } else if (completion->user_data != kDropped) {
        complete(block(completion->user_data), completion->res);
      }
    }
    io_uring_cq_advance(&ring_, seen);
    pump();
  }
}

bool UringEngine::wake_reaper() {
  const std::lock_guard lock(mutex_);
  if (ring_error_ != 0) return true;  // it has left already
  flush();                            // makes room where given-up entries filled the queue
  io_uring_sqe* entry = io_uring_get_sqe(&ring_);
  if (entry == nullptr) return false;
  io_uring_prep_nop(entry);
  io_uring_sqe_set_data64(entry, kStop);
  staged_.push_back({entry, nullptr});
  flush();
  return staged_.empty();
}

void UringEngine::stop() {
  if (!wake_reaper()) {
    // The kernel takes nothing any more. The thread sleeps for ever, on memory that stays.
    reaper_.detach();
    abandoned_ = true;
    return;
  }
  reaper_.join();
  const std::lock_guard lock(registering_);
  io_uring_queue_exit(&ring_);
  registered_.clear();
}

int UringEngine::attach_file(int fd) {
  if (free_files_.empty()) return -1;
  const int slot = free_files_.back();
  if (const int rc = io_uring_register_files_update(&ring_, slot, &fd, 1); rc < 0) {
    note("registered file refused: " + reason(-rc));
    return -1;
  }
  free_files_.pop_back();
  return slot;
}

void UringEngine::detach_file(int slot) {
  int none = -1;
  io_uring_register_files_update(&ring_, slot, &none, 1);
  free_files_.push_back(slot);
}

const UringEngine::Piece* UringEngine::piece_of(std::byte* address, std::size_t nbytes) const {
  auto next = pieces_.upper_bound(address);
  if (next == pieces_.begin()) return nullptr;
  const Piece& piece = std::prev(next)->second;
  const auto into = static_cast<std::size_t>(address - piece.begin);
  return into < piece.nbytes && nbytes <= piece.nbytes - into ? &piece : nullptr;
}

int UringEngine::update_buffer(unsigned index, void* address, std::size_t nbytes) {
  const iovec part{address, nbytes};
  const int rc = io_uring_register_buffers_update_tag(&ring_, index, &part, nullptr, 1);
  return rc < 0 ? -rc : 0;
}

void UringEngine::clear_buffers(const std::vector<Piece>& pieces) {
  for (const Piece& piece : pieces) {
    update_buffer(piece.index, nullptr, 0);
    free_buffers_.push_back(piece.index);
  }
}

bool UringEngine::register_memory(void* address, std::size_t nbytes,
                                  std::shared_ptr<const void> owner) {
  require_own();
  // Populating and pinning the pages takes a while; transfers go on meanwhile.
  const std::lock_guard registering(registering_);
  {
    const std::lock_guard lock(mutex_);
    require_open();
  }
  if (registered_.contains(address)) return true;
  if (free_buffers_.size() < (nbytes + kPieceBytes - 1) / kPieceBytes) {
    const std::lock_guard lock(mutex_);
    note("registered buffers refused for " + std::to_string(nbytes) + " bytes: no free entries");
    return false;
  }
  std::vector<Piece> pieces;
  for (std::size_t done = 0; done < nbytes;) {
    const Piece piece{static_cast<std::byte*>(address) + done, std::min(kPieceBytes, nbytes - done),
                      free_buffers_.back()};
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
  registered_.emplace(address, Registration{std::move(owner), std::move(pieces)});
  return true;
}

void UringEngine::unregister_memory(void* address) {
  require_own();
  const std::lock_guard registering(registering_);
  const auto found = registered_.find(address);
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
