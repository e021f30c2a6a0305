#include "io/engines/block_engine.h"

#include <limits>
#include <stdexcept>
#include <utility>

namespace hetero {

BlockEngine::BlockEngine(const IoOptions& options, MakeDriver* make)
    : shared_(options), driver_(make(shared_, options)) {}

void BlockEngine::require_open() const {
  if (phase_ != Phase::open) throw std::runtime_error("the I/O engine is closed");
}

std::string BlockEngine::kind() const { return driver_->kind(); }

std::vector<std::string> BlockEngine::notes() const {
  fork_.require_own();
  const MutexLock lock(shared_.mutex);
  return shared_.notes;
}

int BlockEngine::add_file(const std::vector<FileMember>& members, const StripeMap& stripes) {
  fork_.require_own();
  auto file = std::make_shared<IoFile>(members, stripes);
  const MutexLock lock(shared_.mutex);
  require_open();
  files_.emplace(next_file_, std::move(file));
  return next_file_++;
}

void BlockEngine::remove_file(int id) {
  fork_.require_own();
  const MutexLock lock(shared_.mutex);
  if (phase_ == Phase::closed) return;  // closed with the engine
  const auto found = files_.find(id);
  if (found == files_.end()) throw std::invalid_argument("no file " + std::to_string(id));
  const std::shared_ptr<IoFile> file = found->second;
  files_.erase(found);
  while (file->pending != 0) shared_.settled.wait(shared_.mutex);
}

bool BlockEngine::register_memory(const Arena& arena) {
  fork_.require_own();
  {
    const MutexLock lock(shared_.mutex);
    require_open();
  }
  // Before the kernel locks the pages, and whether it does: direct transfers lock them one by one.
  arena.wipe_on_fork(0, arena.nbytes());
  return driver_->register_memory(arena);
}

void BlockEngine::unregister_memory(const Arena& arena) {
  fork_.require_own();
  driver_->unregister_memory(arena);
}

std::shared_ptr<IoOp> BlockEngine::submit(IoKind kind, int id, void* address, std::size_t nbytes,
                                          std::uint64_t offset, IoTurn turn) {
  fork_.require_own();
  constexpr std::uint64_t kMaxOffset = std::numeric_limits<std::int64_t>::max();
  if (offset > kMaxOffset || nbytes > kMaxOffset - offset) {
    throw std::invalid_argument("a transfer of " + std::to_string(nbytes) + " bytes at offset " +
                                std::to_string(offset) + " is beyond the largest file");
  }
  if (address == nullptr && nbytes != 0) throw std::invalid_argument("a transfer needs an address");
  Span memory = Span::of(address, nbytes);

  const MutexLock lock(shared_.mutex);
  require_open();
  const auto found = files_.find(id);
  if (found == files_.end()) throw std::invalid_argument("no file " + std::to_string(id));
  auto op = shared_.queue.submit(kind, found->second, static_cast<std::byte*>(address), nbytes,
                                 offset, std::move(memory), turn);
  if (const std::size_t waiting = shared_.queue.waiting()) driver_->wake(waiting);
  return op;
}

void BlockEngine::cancel(IoOp& op) {
  if (op.done()) return;
  fork_.require_own();
  const MutexLock lock(shared_.mutex);
  shared_.queue.cancel(static_cast<Operation&>(op));
}

void BlockEngine::abandon(IoOp& op) noexcept {
  if (fork_.foreign()) return;
  try {
    cancel(op);
    op.wait();
  } catch (...) {  // Nobody wants to know how it ended.
  }
}

IoStats BlockEngine::stats() const {
  fork_.require_own();
  const MutexLock lock(shared_.mutex);
  return shared_.queue.stats();
}

void BlockEngine::inject(const Fault& fault) {
  fork_.require_own();
  const MutexLock lock(shared_.mutex);
  shared_.queue.inject(fault);
}

void BlockEngine::close() {
  if (fork_.foreign()) return;
  const MutexLock lock(shared_.mutex);
  if (phase_ != Phase::open) {
    while (phase_ != Phase::closed) closed_.wait(shared_.mutex);
    return;
  }
  phase_ = Phase::closing;
  shared_.queue.cancel_backlog();
  shared_.wait_for_earlier();
  {
    // The driver's threads take the mutex on their way out.
    const MutexUnlock unlocked(shared_.mutex);
    driver_->stop();
  }
  files_.clear();
  phase_ = Phase::closed;
  closed_.notify_all();
}

}  // namespace hetero
