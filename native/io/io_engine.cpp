#include "io/io_engine.h"

#include <unistd.h>

#include <cerrno>
#include <limits>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "base/check.h"

namespace hetero {

namespace {

std::unique_ptr<Driver> make_driver(const std::string& kind, SharedQueue& shared,
                                    const IoOptions& options) {
  if (kind == "threads") return make_thread_driver(shared, options);
  if (kind == "io_uring") {
#ifdef HETERO_LIBURING
    return make_uring_driver(shared, options);
#else
    throw std::system_error(ENOSYS, std::generic_category(),
                            "the io_uring engine was not built (install liburing-dev and reinstall "
                            "hetero, or use \"threads\")");
#endif
  }
  throw std::invalid_argument("unknown I/O engine \"" + kind +
                              "\": it is \"io_uring\" or \"threads\"");
}

}  // namespace

IoEngine::IoEngine(std::string kind, const IoOptions& options)
    : kind_(std::move(kind)), shared_(options), driver_(make_driver(kind_, shared_, options)) {}

void IoEngine::require_open() const {
  if (phase_ != Phase::open) throw std::runtime_error("the I/O engine is closed");
}

std::vector<std::string> IoEngine::notes() const {
  const MutexLock lock(shared_.mutex, fork_);
  return shared_.notes;
}

const std::shared_ptr<IoFile>& IoEngine::file_of(int id) const {
  const auto found = files_.find(id);
  if (found == files_.end()) throw std::invalid_argument("no file " + std::to_string(id));
  return found->second;
}

PageChecksums& IoEngine::checksums_of(int id) const {
  auto& found = file_of(id)->checksums;
  if (!found) throw std::invalid_argument("file " + std::to_string(id) + " has no checksums");
  return *found;
}

bool IoEngine::has_checksums(int id) const {
  if (!any_checksums_) return false;
  const MutexLock lock(shared_.mutex);
  const auto found = files_.find(id);
  return found != files_.end() && found->second->checksums.has_value();
}

void IoEngine::name_range(int id, std::uint64_t offset, std::uint64_t nbytes, std::string name) {
  auto shared = std::make_shared<const std::string>(std::move(name));
  const MutexLock lock(shared_.mutex, fork_);
  file_of(id)->names.insert_or_assign(offset, IoFile::NamedRange{offset + nbytes, shared});
}

PageChecksums::Checksums IoEngine::checksums(int id, std::uint64_t offset,
                                             std::size_t nbytes) const {
  PageChecksums::require_pages(offset, nbytes);
  const MutexLock lock(shared_.mutex, fork_);
  return checksums_of(id).get(offset, nbytes);
}

void IoEngine::set_checksums(int id, std::uint64_t offset,
                             const PageChecksums::Checksums& checksums) {
  PageChecksums::require_pages(offset, 0);
  const MutexLock lock(shared_.mutex, fork_);
  checksums_of(id).set(offset, checksums);
}

void IoEngine::reserve_checksums(int id, std::uint64_t nbytes) {
  auto table = PageChecksums::table_of(nbytes);  // freed, too, without the lock
  const MutexLock lock(shared_.mutex, fork_);
  checksums_of(id).grow(table);
}

void IoEngine::sync(int id) {
  std::shared_ptr<IoFile> file;
  {
    const MutexLock lock(shared_.mutex, fork_);
    file = file_of(id);
  }
  for (const auto& member : file->members) {
    if (::fdatasync(member->fd.get()) != 0) {
      throw std::system_error(errno, std::generic_category(),
                              "what was written to " + *member->path + " cannot be made durable");
    }
  }
}

int IoEngine::add_file(const std::vector<FileMember>& members, const StripeMap& stripes,
                       bool checksums) {
  fork_.require_own();
  auto file = std::make_shared<IoFile>(members, stripes);
  if (checksums) {
    file->checksums.emplace();
    any_checksums_ = true;
  }
  const MutexLock lock(shared_.mutex);
  require_open();
  files_.emplace(next_file_, std::move(file));
  return next_file_++;
}

void IoEngine::remove_file(int id) {
  // Closed without the lock: freeing an unlinked file's space takes long.
  std::shared_ptr<IoFile> file;
  const MutexLock lock(shared_.mutex, fork_);
  if (phase_ == Phase::closed) return;  // closed with the engine
  const auto found = files_.find(id);
  if (found == files_.end()) throw std::invalid_argument("no file " + std::to_string(id));
  file = found->second;
  files_.erase(found);
  while (file->pending != 0) shared_.settled.wait(shared_.mutex);
}

bool IoEngine::register_memory(const Arena& arena) {
  fork_.require_own();
  {
    const MutexLock lock(shared_.mutex);
    require_open();
  }
  // Before the kernel locks the pages, and whether it does: direct transfers lock them one by one.
  arena.wipe_on_fork(0, arena.nbytes());
  return driver_->register_memory(arena);
}

void IoEngine::unregister_memory(const Arena& arena) {
  fork_.require_own();
  driver_->unregister_memory(arena);
}

std::shared_ptr<IoOp> IoEngine::submit(IoKind kind, int id, void* address, std::size_t nbytes,
                                       std::uint64_t offset, IoTurn turn,
                                       PageChecksums::Checksums checksums) {
  fork_.require_own();
  constexpr std::uint64_t kMaxOffset = std::numeric_limits<std::int64_t>::max();
  if (offset > kMaxOffset || nbytes > kMaxOffset - offset) {
    throw std::invalid_argument("a transfer of " + std::to_string(nbytes) + " bytes at offset " +
                                std::to_string(offset) + " is beyond the largest file");
  }
  if (address == nullptr && nbytes != 0) throw std::invalid_argument("a transfer needs an address");
  Span memory = Span::of(address, nbytes);
  auto* const bytes = static_cast<std::byte*>(address);
  const bool checked = has_checksums(id);
  if (checked) {
    PageChecksums::require_pages(offset, nbytes);
    if (kind == IoKind::write && checksums.empty()) checksums = PageChecksums::of(bytes, nbytes);
    HETERO_CHECK(kind == IoKind::read || checksums.size() == nbytes / PageChecksums::kPageBytes);
  }

  const MutexLock lock(shared_.mutex);
  require_open();
  const std::shared_ptr<IoFile>& file = file_of(id);
  PageChecksums::Checksums expected;
  if (checked && kind == IoKind::read) expected = file->checksums->get(offset, nbytes);
  if (checked && kind == IoKind::write) file->checksums->set(offset, checksums);
  auto op = shared_.queue.submit(kind, file, bytes, nbytes, offset, std::move(memory), turn);
  op->expected = std::move(expected);  // before a waiter has it
  if (const std::size_t waiting = shared_.queue.waiting()) driver_->wake(waiting);
  return op;
}

void IoEngine::hurry(IoOp& op) {
  if (op.done()) return;
  const MutexLock lock(shared_.mutex, fork_);
  shared_.queue.hurry(op);
}

void IoEngine::cancel(IoOp& op) {
  if (op.done()) return;
  const MutexLock lock(shared_.mutex, fork_);
  shared_.queue.cancel(op);
}

IoStats IoEngine::stats() const {
  const MutexLock lock(shared_.mutex, fork_);
  return shared_.queue.stats();
}

void IoEngine::inject(const Fault& fault) {
  const MutexLock lock(shared_.mutex, fork_);
  shared_.queue.inject(fault);
}

void IoEngine::close() {
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
