#include "io/io_operation.h"

#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>

namespace hetero {

namespace {

std::string describe(const Failure& failure) {
  const auto& [kind, path, offset, wanted_bytes, got_bytes, error, free_bytes, name] = failure;
  const std::string what = name == nullptr ? "" : " (" + *name + ")";
  if (error == EBADMSG) {
    return "the page at offset " + std::to_string(offset) + " of " + *path + what +
           " is not what was written there: its checksum is another one, so a disk, or what is on "
           "the way to it, has changed it, unless that write failed";
  }
  std::string text = kind == IoKind::read ? "read of " : "write of ";
  text += std::to_string(wanted_bytes) + " bytes at offset " + std::to_string(offset) + " of " +
          *path + what + " failed after " + std::to_string(got_bytes) + " bytes: ";
  text += error == 0
              ? "unexpected end of file"
              : std::generic_category().message(error) + " (errno " + std::to_string(error) + ")";
  if (free_bytes >= 0) {
    char free[48];
    std::snprintf(free, sizeof free, "; %.1f GiB free",
                  static_cast<double>(free_bytes) / (std::uint64_t{1} << 30));
    text += free;
  }
  return text;
}

}  // namespace

IoError::IoError(Failure failure)
    : std::runtime_error(describe(failure)), Failure(std::move(failure)) {}

void IoOp::wait() {
  wait_done();
  if (failed_member_ != nullptr) {
    std::call_once(looked_, [this] { ask_free_bytes(); });
  } else if (!expected.empty()) {
    std::call_once(looked_, [this] { verify(); });
  }
  if (failure_) throw IoError(*failure_);
}

// By the waiter, whom alone it holds up if the filesystem does not answer.
void IoOp::ask_free_bytes() {
  failure_->free_bytes = failed_member_->free_bytes();
  file.reset();
}

void IoOp::verify() {
  if (failure_) return;  // it was cancelled
  const auto page = PageChecksums::first_difference(address, expected);
  memory.release();
  if (!page) return;
  failure_.emplace(Failure{kind, path_, offset + *page * PageChecksums::kPageBytes,
                           PageChecksums::kPageBytes, PageChecksums::kPageBytes, EBADMSG,
                           Failure::kUnknown, name_});
}

void IoOp::fail(Failure failure, const OpenFile* member) {
  launched = nbytes;
  failure.name = name_;
  if (abandoned()) return;
  failure_.emplace(std::move(failure));
  failed_member_ = member;
}

void IoOp::cancel() {
  if (abandoned()) return;
  launched = nbytes;
  cancelled_ = true;
}

void IoOp::settle() {
  if (cancelled_) {
    failure_.emplace(
        Failure{kind, path_, offset, nbytes, moved, ECANCELED, Failure::kUnknown, name_});
  }
  if (failed_member_ == nullptr) file.reset();
  if (failure_ || expected.empty()) memory.release();
  Completion::settle();
}

}  // namespace hetero
