// The pieces an engine works with: open files, operations and the blocks they are split into.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "io_engine.h"

namespace hetero {

// A duplicated file descriptor, closed when nobody uses it any more.
struct OpenFile {
  // Throws std::system_error when `fd` cannot be duplicated.
  OpenFile(int fd, std::string path);
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  ~OpenFile();

  // Whether `position` is at or past the end; false for what has no size (devices, pipes).
  bool ends_at(std::uint64_t position) const;
  std::int64_t free_bytes() const;  // of the filesystem; -1 if unknown

  int fd;
  std::string path;
  bool regular = false;
  std::size_t alignment = 1;  // transfers resume at multiples of this
  int fixed_slot = -1;        // in the kernel's table of registered files
  std::size_t pending = 0;    // operations not yet settled
};

// One submitted operation. Its plain members belong to the engine (under its mutex); the waiter
// sees the error through the release/acquire pair on `settled_`.
class Operation final : public IoOp {
 public:
  Operation(IoKind kind, std::shared_ptr<OpenFile> file, std::byte* address, std::size_t nbytes,
            std::uint64_t offset, std::uint64_t serial);

  bool done() const override;
  void wait() override;

  bool all_launched() const { return launched == nbytes; }
  // Keeps the first error only, and launches no further block.
  void fail(IoError failure);
  // Wakes the waiters. Called once, when no block is in flight: the memory may be reused.
  void settle();

  const IoKind kind;
  std::shared_ptr<OpenFile> file;  // let go when settled
  std::byte* const address;
  const std::size_t nbytes;
  const std::uint64_t offset;
  const std::uint64_t serial;
  std::size_t launched = 0;  // bytes handed to blocks so far
  unsigned in_flight = 0;    // blocks

 private:
  const pid_t owner_;
  std::optional<IoError> error_;
  std::atomic<int> settled_{0};
};

// A place in the queue: the block that occupies it, or nothing (`op` is null).
struct Block {
  std::size_t slot = 0;
  std::shared_ptr<Operation> op;
  std::byte* address = nullptr;
  std::uint64_t offset = 0;
  std::size_t nbytes = 0;
  std::size_t done_bytes = 0;
  unsigned stalls = 0;  // attempts since the last progress

  std::byte* rest_address() const { return address + done_bytes; }
  std::uint64_t rest_offset() const { return offset + done_bytes; }
  std::size_t rest_bytes() const { return nbytes - done_bytes; }
};

}  // namespace hetero
