// Memory that is exported piecewise as tensors: an anonymous mapping of the host's, or what
// another library has allocated, on a device for example.
//
// Vocabulary: a *pin* is one live export that holds a slot; a *transfer* is an operation that reads
// or writes slots in the background; a *page holder* (a registered buffer) uses the physical pages,
// and would go on using the old ones if they were discarded. Page-locked memory is called that.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "memory/dlpack.h"

namespace hetero {

// The size of the pages that arenas ask for and that registered buffers are cut at.
inline constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

// The size of the system's other pages.
std::size_t page_bytes();

// Atomic counters: how many live exports hold each slot.
class Pins {
 public:
  explicit Pins(std::size_t slots);
  std::size_t size() const { return slots_; }
  // The accessors throw std::out_of_range for a slot that does not exist.
  std::int64_t count(std::size_t slot) const;
  void take(std::size_t slot);
  void drop(std::size_t slot);
  // The slots whose count is not zero, in order.
  std::vector<std::size_t> in_use() const;

 private:
  std::atomic<std::int64_t>& counter(std::size_t slot) const;

  std::size_t slots_;
  std::unique_ptr<std::atomic<std::int64_t>[]> counts_;
};

// Memory of a fixed size. What it maps itself is anonymous and page-aligned, huge pages advised,
// populated on first touch. The memory lives until the arena and everything exported or held from
// it are gone.
class Arena {
 public:
  // Of slots of `slot_bytes`, the last one perhaps shorter; 0: of one slot. Throws
  // std::invalid_argument for zero bytes and std::bad_alloc (its text has the size) when the memory
  // cannot be mapped.
  explicit Arena(std::size_t nbytes, std::size_t slot_bytes = 0);
  // Over `nbytes` at `address` on `device`, which nothing here touches. `release` is called when
  // nobody needs them any more, on any thread. Throws std::invalid_argument for zero bytes.
  Arena(std::byte* address, std::size_t nbytes, dlpack::Device device,
        std::function<void()> release, std::size_t slot_bytes = 0);

  std::size_t nbytes() const;  // what it maps itself is rounded up to the page size
  std::byte* address() const;

  // A uint8[nbytes] tensor at `offset` that keeps the memory alive. With `pins`, `slot` is held
  // until the deleter runs, which may be on any thread.
  dlpack::ManagedTensor* export_tensor(std::size_t offset, std::size_t nbytes,
                                       std::shared_ptr<Pins> pins, std::size_t slot) const;

  // How many transfers use each slot now.
  std::shared_ptr<const Pins> transfers() const;

  // In a child that is forked from now on the pages that overlap the range are left out: who reads
  // them ends it with SIGSEGV. For pages that the kernel has page-locked, which it would otherwise
  // copy for the child, one by one, during the fork. Nothing for memory that is somebody else's.
  void wipe_on_fork(std::size_t offset, std::size_t nbytes) const;

  // What the deleter of an exported tensor does, but for giving back the memory: its caller may let
  // go of that later.
  static std::shared_ptr<const void> end_export(dlpack::ManagedTensor* tensor);

  // Gives the pages wholly inside the range back to the system; they read zero afterwards.
  // Throws std::logic_error while its pages are held or a transfer uses a slot of the range, and
  // for memory that is somebody else's.
  void discard(std::size_t offset, std::size_t nbytes);

  // Keeps the memory mapped, and its pages in place, for as long as the result lives.
  std::shared_ptr<const void> hold_pages() const;

 private:
  friend class Span;
  struct Mapping;
  struct Export;

  void check_range(std::size_t offset, std::size_t nbytes) const;

  std::shared_ptr<Mapping> mapping_;
};

// Memory of one arena that a transfer uses: it stays mapped and its slots count as used by a
// transfer until release(), whatever becomes of the arena and of the transfer's handle.
class Span {
 public:
  Span() = default;  // of no memory
  // Throws std::invalid_argument unless the bytes lie in one arena that is alive.
  static Span of(const void* address, std::size_t nbytes);
  Span(Span&& other) noexcept;
  Span& operator=(Span&&) = delete;
  // Its slots were taken, so that they can be dropped. NOLINTNEXTLINE(bugprone-exception-escape)
  ~Span() { release(); }

  void release();
  // Never releases it: the kernel may write to the memory at any time.
  void leak();

 private:
  Span(std::shared_ptr<const Arena::Mapping> mapping, const void* address, std::size_t nbytes);

  std::shared_ptr<const Arena::Mapping> mapping_;
  std::size_t first_slot_ = 0, past_slot_ = 0;
};

}  // namespace hetero
