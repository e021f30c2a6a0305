#include "io/io_operation.h"

#include <cerrno>
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
      memory(std::move(memory)) {}

void Operation::wait() {
  completion_.wait();
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
  completion_.settle();
}

}  // namespace hetero
