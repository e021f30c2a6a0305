#include "io/io_operation.h"

#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <utility>

namespace hetero {

Operation::Operation(IoKind kind, std::shared_ptr<IoFile> file, std::byte* address,
                     std::size_t nbytes, std::uint64_t offset, std::uint64_t serial, Span memory)
    : kind(kind),
      file(std::move(file)),
      address(address),
      nbytes(nbytes),
      offset(offset),
      serial(serial),
      memory(std::move(memory)),
      owner_(::getpid()) {}

bool Operation::done() const { return settled_.load(std::memory_order_acquire) != 0; }

void Operation::wait() {
  while (!done()) {
    if (::getpid() != owner_) {
      throw std::runtime_error("this transfer belongs to process " + std::to_string(owner_) +
                               ", from which this one was forked");
    }
    settled_.wait(0, std::memory_order_acquire);
  }
  if (failure_) {
    throw IoError(kind, *failure_->path, failure_->offset, failure_->wanted_bytes,
                  failure_->got_bytes, failure_->error, failure_->free_bytes);
  }
}

void Operation::fail(Failure failure) {
  launched = nbytes;
  if (!abandoned()) failure_.emplace(std::move(failure));
}

void Operation::cancel() {
  if (abandoned()) return;
  launched = nbytes;
  cancelled_ = true;
}

void Operation::settle() {
  if (cancelled_) failure_.emplace(Failure{file->path, offset, nbytes, moved, ECANCELED, -1});
  file.reset();
  memory.release();
  settled_.store(1, std::memory_order_release);
  settled_.notify_all();
}

}  // namespace hetero
