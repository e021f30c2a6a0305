// Operations, and the blocks that engines split them into.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/completion.h"
#include "io/io_file.h"
#include "memory/arena.h"

namespace hetero {

enum class IoKind { read, write };

// When an operation's blocks take their turn: first those of `next`, for which somebody waits; then
// those of `soon`, for which somebody is going to; and those of `idle`, which can wait, after all
// others. Among equals it is the order of submission. A block that is in flight is not overtaken.
enum class IoTurn { next, soon, idle };
inline constexpr std::size_t kIoTurns = 3;

// Why an operation failed. Noted by the engine's threads, so it allocates nothing; the waiter makes
// the exception of it. One that cancel() or close() cut off has ECANCELED, and its numbers are
// those of the whole operation: where it begins in the logical file, its size, and how many of its
// bytes were transferred (not always the first ones). If a page is not what was written there, that
// is EBADMSG, and `offset` is the page's in the logical file.
struct Failure {
  static constexpr std::int64_t kUnknown = -1;

  IoKind kind;
  std::shared_ptr<const std::string> path;
  std::uint64_t offset;      // into the member file, where the failing block began
  std::size_t wanted_bytes;  // of the block that failed
  std::size_t got_bytes;
  int error;                                          // errno; 0 for an unexpected end of file
  std::int64_t free_bytes;                            // of the filesystem, or kUnknown
  std::shared_ptr<const std::string> name = nullptr;  // of the range of the file, if it has one
};

struct IoError : std::runtime_error, Failure {
  explicit IoError(Failure failure);
};

// One submitted operation, shared by the submitter, who waits, and the engine. All but the
// completion belongs to the queue, under its engine's mutex; the waiter reads the failure once the
// operation is settled.
class IoOp : public Completion {
 public:
  IoOp(IoKind kind, std::shared_ptr<IoFile> file, std::byte* address, std::size_t nbytes,
       std::uint64_t offset, std::uint64_t serial, Span&& memory)
      : Completion("transfer"),
        kind(kind),
        file(std::move(file)),
        address(address),
        nbytes(nbytes),
        offset(offset),
        serial(serial),
        memory(std::move(memory)),
        path_(this->file->path),
        name_(this->file->name_at(offset)) {}

  // Blocks; throws IoError if the operation failed. When it is called first, it compares what was
  // read with `expected`, or asks the filesystem of a transfer that failed for its free bytes.
  void wait();

  bool all_launched() const { return launched == nbytes; }
  // Whether nobody wants what its blocks may still transfer: it failed, or was cancelled.
  bool abandoned() const { return cancelled_ || failure_.has_value(); }
  // Keeps the first failure only, of that member, and launches no further block.
  void fail(Failure failure, const OpenFile* member);
  // Launches no further block. Nothing if it has failed.
  void cancel();
  // Wakes the waiters. Called once, when no block is in flight: the memory may be reused.
  void settle();

  const IoKind kind;
  std::shared_ptr<IoFile> file;  // let go when settled, or after a failure by wait()
  std::byte* const address;
  const std::size_t nbytes;
  const std::uint64_t offset;
  const std::uint64_t serial;
  Span memory;  // let go when settled; what is to be compared, when it was, or with the operation
  PageChecksums::Checksums expected;            // of the pages that are read, if they are known
  std::size_t launched = 0;                     // bytes handed to blocks so far
  std::size_t moved = 0;                        // bytes transferred by blocks that are back
  unsigned in_flight = 0;                       // blocks
  std::chrono::steady_clock::time_point begun;  // for the timeline: the first block's transfer

 private:
  void verify();
  void ask_free_bytes();

  bool cancelled_ = false;
  const std::shared_ptr<const std::string> path_, name_;
  std::once_flag looked_;
  std::optional<Failure> failure_;
  const OpenFile* failed_member_ = nullptr;
};

enum class BlockState {
  free,          // of no operation
  queued,        // to be taken by a thread of the engine
  transferring,  // taken: the memory belongs to the kernel
  resting,       // made no progress, and is queued again after a pause
};

// A place in the queue, and the block that occupies it.
struct Block {
  std::size_t index = 0;
  BlockState state = BlockState::free;
  std::shared_ptr<IoOp> op;
  const OpenFile* file = nullptr;  // the member, which `op` keeps open
  std::byte* address = nullptr;
  std::uint64_t offset = 0;  // in the member
  std::size_t nbytes = 0;
  std::size_t done_bytes = 0;
  unsigned stalls = 0;                               // attempts since the last progress
  std::chrono::steady_clock::time_point give_up_at;  // if stalls != 0
  Block* next = nullptr;                             // in the list of those queued, or resting

  std::byte* rest_address() const { return address + done_bytes; }
  std::uint64_t rest_offset() const { return offset + done_bytes; }
  std::size_t rest_bytes() const { return nbytes - done_bytes; }
};

}  // namespace hetero
