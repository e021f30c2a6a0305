#include "io/engines/block_engine.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <limits>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>

#include "base/timeline.h"

namespace hetero {

namespace {

constexpr unsigned kMaxQueueDepth = 4096;
constexpr std::size_t kMaxBlockBytes = std::size_t{1} << 30;  // the kernel cuts at 2 GiB
constexpr std::size_t kBlockUnitBytes = 4096;                 // keeps O_DIRECT blocks aligned

// Attempts without progress: the first few at once, then with pauses, for a second since the first.
constexpr unsigned kFreeStalls = 8;
constexpr std::chrono::seconds kStallLimit{1};
constexpr std::chrono::milliseconds kStallPause{1};

IoOptions checked(const IoOptions& options) {
  if (options.queue_depth == 0 || options.queue_depth > kMaxQueueDepth) {
    throw std::invalid_argument("queue_depth must be from 1 to " + std::to_string(kMaxQueueDepth) +
                                ", not " + std::to_string(options.queue_depth));
  }
  if (options.block_bytes == 0 || options.block_bytes > kMaxBlockBytes ||
      options.block_bytes % kBlockUnitBytes != 0) {
    throw std::invalid_argument("block_bytes must be a multiple of 4096 up to 1 GiB, not " +
                                std::to_string(options.block_bytes));
  }
  return options;
}

// EINTR and EAGAIN by definition; ECANCELED because io_uring cancels queued work of a thread that
// exits, and the submitting thread may be any.
bool transient(int error) { return error == EAGAIN || error == EINTR || error == ECANCELED; }

}  // namespace

BlockEngine::BlockEngine(const IoOptions& options)
    : options_(checked(options)), owner_(::getpid()), blocks_(options.queue_depth) {
  free_blocks_.reserve(blocks_.size());
  for (std::size_t slot = blocks_.size(); slot-- > 0;) {
    blocks_[slot].slot = slot;
    free_blocks_.push_back(&blocks_[slot]);
  }
}

bool BlockEngine::foreign() const { return ::getpid() != owner_; }

void BlockEngine::require_own() const {
  if (foreign()) {
    throw std::runtime_error("this I/O engine belongs to process " + std::to_string(owner_) +
                             ", from which this one was forked: make a new engine here");
  }
}

void BlockEngine::require_open() const {
  if (phase_ != Phase::open) throw std::runtime_error("the I/O engine is closed");
}

std::vector<std::string> BlockEngine::notes() const {
  require_own();
  const std::lock_guard lock(mutex_);
  return notes_;
}

void BlockEngine::note(std::string text) {
  if (std::find(notes_.begin(), notes_.end(), text) == notes_.end()) {
    notes_.push_back(std::move(text));
  }
}

int BlockEngine::add_file(const std::vector<FileMember>& members, const StripeMap& stripes) {
  require_own();
  auto file = std::make_shared<IoFile>(members, stripes);
  const std::lock_guard lock(mutex_);
  require_open();
  files_.emplace(next_file_, std::move(file));
  return next_file_++;
}

void BlockEngine::remove_file(int id) {
  require_own();
  std::unique_lock lock(mutex_);
  if (phase_ == Phase::closed) return;  // closed with the engine
  const auto found = files_.find(id);
  if (found == files_.end()) throw std::invalid_argument("no file " + std::to_string(id));
  const std::shared_ptr<IoFile> file = found->second;
  files_.erase(found);
  changed_.wait(lock, [&] { return file->pending == 0; });
}

std::shared_ptr<IoOp> BlockEngine::submit(IoKind kind, int id, void* address, std::size_t nbytes,
                                          std::uint64_t offset, IoTurn turn) {
  require_own();
  constexpr std::uint64_t kMaxOffset = std::numeric_limits<std::int64_t>::max();
  if (offset > kMaxOffset || nbytes > kMaxOffset - offset) {
    throw std::invalid_argument("a transfer of " + std::to_string(nbytes) + " bytes at offset " +
                                std::to_string(offset) + " is beyond the largest file");
  }
  if (address == nullptr && nbytes != 0) throw std::invalid_argument("a transfer needs an address");

  Span memory = Span::of(address, nbytes);
  const std::lock_guard lock(mutex_);
  require_open();
  const auto found = files_.find(id);
  if (found == files_.end()) throw std::invalid_argument("no file " + std::to_string(id));
  auto op = std::make_shared<Operation>(kind, found->second, static_cast<std::byte*>(address),
                                        nbytes, offset, next_serial_++, std::move(memory));
  unsettled_.insert(op->serial);
  ++op->file->pending;
  if (nbytes == 0) {
    settle_if_finished(*op);
    return op;
  }
  (turn == IoTurn::next ? next_ : idle_).push_back(op);
  pump();
  return op;
}

void BlockEngine::cancel(IoOp& handle) {
  if (handle.done()) return;
  require_own();
  const std::lock_guard lock(mutex_);
  auto& op = static_cast<Operation&>(handle);
  if (op.done()) return;
  op.cancel();
  settle_if_finished(op);
}

void BlockEngine::abandon(IoOp& op) noexcept {
  if (foreign()) return;
  try {
    cancel(op);
    op.wait();
  } catch (...) {  // Nobody wants to know how it ended.
  }
}

IoStats BlockEngine::stats() const {
  require_own();
  const std::lock_guard lock(mutex_);
  IoStats now = stats_;
  now.in_flight = blocks_.size() - free_blocks_.size();
  return now;
}

void BlockEngine::inject(const Fault& fault) {
  require_own();
  const std::lock_guard lock(mutex_);
  faults_.add(fault);
}

void BlockEngine::close() {
  if (foreign()) return;
  std::unique_lock lock(mutex_);
  if (phase_ != Phase::open) {
    changed_.wait(lock, [&] { return phase_ == Phase::closed; });
    return;
  }
  phase_ = Phase::closing;
  for (Backlog* backlog : {&next_, &idle_}) {
    for (const auto& op : *backlog) {
      if (op->all_launched()) continue;
      op->cancel();
      ++stats_.errors;
      settle_if_finished(*op);
    }
    backlog->clear();
  }
  changed_.wait(lock, [&] { return unsettled_.empty(); });
  // The threads take the mutex on their way out.
  lock.unlock();
  stop();
  lock.lock();
  files_.clear();
  phase_ = Phase::closed;
  changed_.notify_all();
}

void BlockEngine::wait_for_earlier(std::unique_lock<std::mutex>& lock) {
  const std::uint64_t end = next_serial_;
  changed_.wait(lock, [&] { return unsettled_.empty() || *unsettled_.begin() >= end; });
}

void BlockEngine::refill() {
  while (!free_blocks_.empty() && launch_next()) {
  }
}

void BlockEngine::pump() {
  refill();
  if (waiting_ != 0) wake(waiting_);
}

Block* BlockEngine::take() {
  for (;;) {
    refill();
    if (first_ == nullptr) return nullptr;
    Block& block = *first_;
    first_ = block.next;
    --waiting_;
    if (!block.op->abandoned()) {
      timeline::mark(block.op->begun);
      return &block;
    }
    release(block);
  }
}

// The one whose first operation is to be launched next; null if none is left.
BlockEngine::Backlog* BlockEngine::backlog() {
  for (Backlog* backlog : {&next_, &idle_}) {
    // An operation that failed early or was cancelled has nothing left to launch.
    while (!backlog->empty() && backlog->front()->all_launched()) backlog->pop_front();
    if (!backlog->empty()) return backlog;
  }
  return nullptr;
}

bool BlockEngine::launch_next() {
  Backlog* const from = backlog();
  if (from == nullptr) return false;
  Block& block = *free_blocks_.back();
  free_blocks_.pop_back();
  block.op = from->front();
  Operation& op = *block.op;
  const StripeMap::Place place = op.file->stripes.place(op.offset + op.launched);
  block.file = op.file->members[place.member].get();
  block.address = op.address + op.launched;
  block.offset = place.offset;
  block.nbytes = std::min(options_.block_bytes, op.nbytes - op.launched);
  if (block.nbytes > place.run_bytes) block.nbytes = place.run_bytes;
  block.done_bytes = 0;
  block.stalls = 0;
  op.launched += block.nbytes;
  ++op.in_flight;
  restart(block);
  return true;
}

void BlockEngine::restart(Block& block) {
  if (lost()) return fail(block, lost_error_, block.done_bytes);
  block.next = nullptr;
  (first_ == nullptr ? first_ : last_->next) = &block;
  last_ = &block;
  ++waiting_;
}

bool BlockEngine::retry(Block& block) {
  const auto now = std::chrono::steady_clock::now();
  if (block.stalls++ == 0) block.give_up_at = now + kStallLimit;
  if (block.stalls <= kFreeStalls) {
    restart(block);
  } else if (now < block.give_up_at) {
    block.next = std::exchange(resting_, &block);
  } else {
    return false;
  }
  ++stats_.retries;
  return true;
}

void BlockEngine::rest(std::unique_lock<std::mutex>& lock) {
  Block* block = std::exchange(resting_, nullptr);
  if (block == nullptr) return;
  lock.unlock();
  std::this_thread::sleep_for(kStallPause);
  lock.lock();
  while (block != nullptr) restart(*std::exchange(block, block->next));
}

void BlockEngine::complete(Block& block, std::int64_t result) noexcept {
  // What throws does so before the block is let go.
  try {
    judge(block, faults_.apply(block.op->kind, result));
  } catch (const std::bad_alloc&) {
    fail(block, ENOMEM, block.done_bytes);
  } catch (...) {
    fail(block, EIO, block.done_bytes);
  }
}

void BlockEngine::judge(Block& block, std::int64_t result) {
  if (result < 0) {
    const int error = static_cast<int>(-result);
    if (transient(error)) {
      if (block.op->abandoned()) return release(block);
      if (retry(block)) return;
    }
    return fail(block, error, block.done_bytes);
  }
  const auto got = static_cast<std::size_t>(result);
  if (got < block.rest_bytes()) {
    continue_short(block, got);
    return;
  }
  if (block.op->kind == IoKind::read) {
    ++stats_.reads;
    stats_.read_bytes += block.nbytes;
  } else {
    ++stats_.writes;
    stats_.written_bytes += block.nbytes;
  }
  block.done_bytes = block.nbytes;
  release(block);
}

void BlockEngine::continue_short(Block& block, std::size_t got) {
  ++stats_.short_transfers;
  const OpenFile& file = *block.file;
  if (block.op->kind == IoKind::read && (got == 0 || file.ends_at(block.rest_offset() + got))) {
    fail(block, 0, block.done_bytes + got);
    return;
  }
  // A direct transfer may stop between sectors but cannot start there: redo the broken part.
  const std::size_t resume = (block.done_bytes + got) / file.alignment * file.alignment;
  if (block.op->abandoned()) {
    block.done_bytes += got;
    release(block);
  } else if (resume > block.done_bytes) {
    block.done_bytes = resume;
    block.stalls = 0;
    restart(block);
  } else if (!retry(block)) {
    fail(block, EIO, block.done_bytes + got);
  }
}

void BlockEngine::fail(Block& block, int error, std::size_t got_bytes) {
  ++stats_.errors;
  block.op->fail(
      {block.file->path, block.offset, block.nbytes, got_bytes, error, block.file->free_bytes()});
  block.done_bytes = got_bytes;
  release(block);
}

void BlockEngine::release(Block& block) {
  const std::shared_ptr<Operation> op = std::move(block.op);
  block.op.reset();
  free_blocks_.push_back(&block);
  op->moved += block.done_bytes;
  --op->in_flight;
  settle_if_finished(*op);
}

void BlockEngine::settle_if_finished(Operation& op) {
  if (op.in_flight != 0 || !op.all_launched()) return;
  unsettled_.erase(op.serial);
  --op.file->pending;
  if (timeline::on() && op.moved != 0) {
    const bool read = op.kind == IoKind::read;
    timeline::note(read ? timeline::Lane::nvme_read : timeline::Lane::nvme_write, op.begun,
                   op.moved);
  }
  op.settle();
  changed_.notify_all();
}

void BlockEngine::lose(int error) {
  lost_error_ = error;
  first_ = nullptr;
  waiting_ = 0;
  for (Block& each : blocks_) {
    if (each.op) fail(each, error, each.done_bytes);
  }
  pump();
}

}  // namespace hetero
