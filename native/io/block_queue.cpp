#include "io/block_queue.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/timeline.h"

namespace hetero {

namespace {

constexpr unsigned kMaxQueueDepth = 4096;
constexpr std::size_t kMaxBlockBytes = std::size_t{1} << 30;  // the kernel cuts at 2 GiB
constexpr double kMaxPatienceS = 3600;
constexpr std::size_t kBlockUnitBytes = 4096;  // keeps O_DIRECT blocks aligned

// Attempts without progress: the first few at once, then with pauses, until patience ends.
constexpr unsigned kFreeStalls = 8;

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
  if (!(options.patience_s >= 0.0 && options.patience_s <= kMaxPatienceS)) {
    throw std::invalid_argument("patience_s must be from 0 to 3600, not " +
                                std::to_string(options.patience_s));
  }
  return options;
}

// EINTR and EAGAIN by definition; ECANCELED because io_uring cancels queued work of a thread that
// exits, and the submitting thread may be any; ENOMEM because memory that a cgroup lacks now it has
// when something else was written back.
bool transient(int error) {
  return error == EAGAIN || error == EINTR || error == ECANCELED || error == ENOMEM;
}

}  // namespace

BlockQueue::BlockQueue(const IoOptions& options, Condition& settled)
    : block_bytes_(checked(options).block_bytes),
      patience_(std::chrono::duration_cast<std::chrono::steady_clock::duration>(
          std::chrono::duration<double>(options.patience_s))),
      settled_(settled),
      blocks_(options.queue_depth) {
  free_.reserve(blocks_.size());
  for (std::size_t index = blocks_.size(); index-- > 0;) {
    blocks_[index].index = index;
    free_.push_back(&blocks_[index]);
  }
}

std::shared_ptr<IoOp> BlockQueue::submit(IoKind kind, std::shared_ptr<IoFile> file,
                                         std::byte* address, std::size_t nbytes,
                                         std::uint64_t offset, Span memory, IoTurn turn) {
  auto op = std::make_shared<IoOp>(kind, std::move(file), address, nbytes, offset, next_serial_,
                                   std::move(memory));
  Backlog& backlog = backlog_of(turn);
  backlog.push_back(op);
  try {
    unsettled_.insert(op->serial);
  } catch (...) {
    backlog.pop_back();
    throw;
  }
  ++next_serial_;
  ++op->file->pending;
  if (nbytes == 0) settle_if_finished(*op);
  launch_all();
  check();
  return op;
}

void BlockQueue::hurry(IoOp& op) {
  if (op.all_launched()) return;
  for (const IoTurn turn : {IoTurn::soon, IoTurn::idle}) {
    Backlog& from = backlog_of(turn);
    const auto is_it = [&](const auto& each) { return each.get() == &op; };
    const auto found = std::find_if(from.begin(), from.end(), is_it);
    if (found == from.end()) continue;
    backlog_of(IoTurn::next).push_back(*found);  // first, because it may throw
    from.erase(found);
    break;
  }
  check();
}

void BlockQueue::cancel(IoOp& op) {
  if (op.done()) return;
  op.cancel();
  settle_if_finished(op);
}

void BlockQueue::cancel_backlog() {
  for (Backlog& backlog : backlogs_) {
    for (const auto& op : backlog) {
      if (op->all_launched()) continue;
      op->cancel();
      ++stats_.errors;
      settle_if_finished(*op);
    }
    backlog.clear();
  }
}

bool BlockQueue::uses(const std::byte* memory, std::size_t nbytes, std::uint64_t end) const {
  const auto is_one = [&](const std::shared_ptr<IoOp>& op) {
    return op != nullptr && !op->done() && op->serial < end && op->address < memory + nbytes &&
           memory < op->address + op->nbytes;
  };
  for (const Backlog& backlog : backlogs_) {
    if (std::ranges::any_of(backlog, is_one)) return true;
  }
  return std::ranges::any_of(blocks_, is_one, &Block::op);
}

double BlockQueue::busy_seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - busy_since_).count();
}

IoStats BlockQueue::stats() const {
  IoStats now = stats_;
  now.in_flight = blocks_.size() - free_.size();
  if (now.in_flight != 0) now.busy_s += busy_seconds();
  return now;
}

void BlockQueue::inject(const Fault& fault) {
  if (fault.error < 0 || (fault.error == 0 && fault.short_bytes < 0 && !fault.throws)) {
    throw std::invalid_argument("a fault needs a positive errno, a number of bytes or throws");
  }
  if (fault.count == 0) throw std::invalid_argument("a fault needs a count of at least 1");
  faults_.push_back(fault);
}

std::size_t BlockQueue::waiting() {
  launch_all();
  return queued_;
}

void BlockQueue::launch_all() {
  while (!free_.empty() && launch_next()) {
  }
}

Block* BlockQueue::take() {
  for (;;) {
    launch_all();
    if (first_ == nullptr) return nullptr;
    Block& block = *first_;
    first_ = block.next;
    --queued_;
    if (!block.op->abandoned()) {
      block.state = BlockState::transferring;
      ++transferring_;
      timeline::mark(block.op->begun);
      return &block;
    }
    release(block);
  }
}

// The one whose first operation is to be launched next; null if none is left.
BlockQueue::Backlog* BlockQueue::backlog() {
  for (Backlog& backlog : backlogs_) {
    // An operation that failed early or was cancelled has nothing left to launch.
    while (!backlog.empty() && backlog.front()->all_launched()) backlog.pop_front();
    if (!backlog.empty()) return &backlog;
  }
  return nullptr;
}

bool BlockQueue::launch_next() {
  Backlog* const from = backlog();
  if (from == nullptr) return false;
  if (free_.size() == blocks_.size()) busy_since_ = std::chrono::steady_clock::now();
  Block& block = *free_.back();
  free_.pop_back();
  block.op = from->front();
  IoOp& op = *block.op;
  const StripeMap::Place place = op.file->stripes.place(op.offset + op.launched);
  block.file = op.file->members[place.member].get();
  block.address = op.address + op.launched;
  block.offset = place.offset;
  block.nbytes = std::min(block_bytes_, op.nbytes - op.launched);
  if (block.nbytes > place.run_bytes) block.nbytes = place.run_bytes;
  block.done_bytes = 0;
  block.stalls = 0;
  op.launched += block.nbytes;
  ++op.in_flight;
  enqueue(block);
  return true;
}

void BlockQueue::enqueue(Block& block) {
  if (lost()) return fail(block, lost_error_, block.done_bytes);
  block.state = BlockState::queued;
  block.next = nullptr;
  (first_ == nullptr ? first_ : last_->next) = &block;
  last_ = &block;
  ++queued_;
}

bool BlockQueue::retry(Block& block) {
  if (lost()) return false;
  const auto now = std::chrono::steady_clock::now();
  if (block.stalls++ == 0) block.give_up_at = now + patience_;
  if (block.stalls <= kFreeStalls) {
    enqueue(block);
  } else if (now < block.give_up_at) {
    block.state = BlockState::resting;
    block.next = std::exchange(resting_, &block);
  } else {
    return false;
  }
  ++stats_.retries;
  return true;
}

void BlockQueue::end_pause(Block* resting) {
  while (resting != nullptr) enqueue(*std::exchange(resting, resting->next));
}

void BlockQueue::complete(Block& block, std::int64_t result) noexcept {
  HETERO_CHECK(block.state == BlockState::transferring);
  --transferring_;
  // What throws does so before the block is let go.
  try {
    judge(block, with_faults(block.op->kind, result));
  } catch (const std::bad_alloc&) {
    fail(block, ENOMEM, block.done_bytes);
  } catch (...) {
    fail(block, EIO, block.done_bytes);
  }
  if (lost()) launch_all();  // nobody will take(): what waited for the place fails
  check();
}

std::int64_t BlockQueue::with_faults(IoKind kind, std::int64_t result) {
  bool throws = false;
  for (Fault& fault : faults_) {
    if (fault.kind != kind) continue;
    if (fault.nth != 0) {
      --fault.nth;
      continue;
    }
    --fault.count;
    throws |= fault.throws;
    if (fault.error != 0) {
      result = -fault.error;
    } else if (fault.short_bytes >= 0) {
      result = std::min(result, fault.short_bytes);
    }
  }
  std::erase_if(faults_, [](const Fault& fault) { return fault.count == 0; });
  if (throws) throw std::runtime_error("an injected fault");
  return result;
}

void BlockQueue::judge(Block& block, std::int64_t result) {
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

void BlockQueue::continue_short(Block& block, std::size_t got) {
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
    enqueue(block);
  } else if (!retry(block)) {
    fail(block, EIO, block.done_bytes + got);
  }
}

void BlockQueue::fail(Block& block, int error, std::size_t got_bytes) {
  ++stats_.errors;
  block.op->fail({block.op->kind, block.file->path, block.offset, block.nbytes, got_bytes, error,
                  Failure::kUnknown},
                 block.file);
  block.done_bytes = got_bytes;
  release(block);
}

void BlockQueue::release(Block& block) {
  const std::shared_ptr<IoOp> op = std::move(block.op);
  block.op.reset();
  block.state = BlockState::free;
  free_.push_back(&block);
  if (free_.size() == blocks_.size()) stats_.busy_s += busy_seconds();
  op->moved += block.done_bytes;
  --op->in_flight;
  settle_if_finished(*op);
}

void BlockQueue::settle_if_finished(IoOp& op) {
  if (op.in_flight != 0 || !op.all_launched()) return;
  unsettled_.erase(op.serial);
  --op.file->pending;
  if (timeline::on() && op.moved != 0) {
    const bool read = op.kind == IoKind::read;
    timeline::note(read ? "nvme_read" : "nvme_write", op.begun, op.moved);
  }
  op.settle();
  settled_.notify_all();
}

void BlockQueue::lose(int error) {
  lost_error_ = error;
  end_pause(begin_pause());
  while (first_ != nullptr) {
    Block& block = *std::exchange(first_, first_->next);
    --queued_;
    fail(block, error, block.done_bytes);
  }
  launch_all();
  check();
}

void BlockQueue::abandon(int error) {
  for (Block& each : blocks_) {
    if (each.state != BlockState::transferring) continue;
    each.op->memory.leak();
    complete(each, -error);
  }
}

void BlockQueue::check() const {
#ifdef HETERO_CHECKS
  std::size_t count[4] = {};
  for (const Block& each : blocks_) {
    ++count[static_cast<std::size_t>(each.state)];
    HETERO_CHECK((each.state == BlockState::free) == (each.op == nullptr));
    HETERO_CHECK(!each.op || (each.op->in_flight != 0 && !each.op->done()));
    HETERO_CHECK(!each.op || each.done_bytes <= each.nbytes);
  }
  HETERO_CHECK(count[0] == free_.size());
  HETERO_CHECK(count[1] == queued_ && (queued_ == 0) == (first_ == nullptr));
  HETERO_CHECK(count[2] == transferring_);
  std::size_t listed = 0;
  for (const Block* each = first_; each != nullptr; each = each->next, ++listed) {
    HETERO_CHECK(each->state == BlockState::queued);
  }
  HETERO_CHECK(listed == queued_);
  HETERO_CHECK(count[3] != 0 || resting_ == nullptr);
  for (const Backlog& backlog : backlogs_) {
    for (const auto& op : backlog) {
      HETERO_CHECK(op->done() || unsettled_.contains(op->serial));
      HETERO_CHECK(op->launched <= op->nbytes);
    }
  }
  HETERO_CHECK(!lost() || queued_ == 0);
#endif
}

}  // namespace hetero
