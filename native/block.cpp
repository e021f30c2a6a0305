#include "block.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace hetero {

namespace {

// No device asks for more; where less would do, a little is transferred again.
constexpr std::size_t kDirectAlignment = 4096;

}  // namespace

OpenFile::OpenFile(int source, std::string name)
    : fd(::fcntl(source, F_DUPFD_CLOEXEC, 0)), path(std::move(name)) {
  if (fd < 0) throw std::system_error(errno, std::generic_category(), "cannot add file " + path);
  struct stat status;
  regular = ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags >= 0 && (flags & O_DIRECT) != 0) alignment = kDirectAlignment;
}

OpenFile::~OpenFile() { ::close(fd); }

bool OpenFile::ends_at(std::uint64_t position) const {
  struct stat status;
  return regular && ::fstat(fd, &status) == 0 &&
         position >= static_cast<std::uint64_t>(status.st_size);
}

std::int64_t OpenFile::free_bytes() const {
  struct statvfs status;
  if (::fstatvfs(fd, &status) != 0) return -1;
  return static_cast<std::int64_t>(status.f_bavail * status.f_frsize);
}

Operation::Operation(IoKind kind, std::shared_ptr<OpenFile> file, std::byte* address,
                     std::size_t nbytes, std::uint64_t offset, std::uint64_t serial)
    : kind(kind),
      file(std::move(file)),
      address(address),
      nbytes(nbytes),
      offset(offset),
      serial(serial),
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
  if (error_) throw IoError(*error_);
}

void Operation::fail(IoError failure) {
  launched = nbytes;
  if (!error_) error_.emplace(std::move(failure));
}

void Operation::settle() {
  file.reset();
  settled_.store(1, std::memory_order_release);
  settled_.notify_all();
}

}  // namespace hetero
