#include "memory/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "memory/huge_page.h"

namespace hetero {

namespace {

std::size_t page_bytes() {
  static const auto bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

std::size_t round_up(std::size_t value, std::size_t unit) {
  if (value > std::numeric_limits<std::size_t>::max() - (unit - 1)) return 0;
  return (value + unit - 1) / unit * unit;
}

// A bad_alloc that says how much was wanted.
class MapError : public std::bad_alloc {
 public:
  MapError(std::size_t nbytes, int error)
      : text_("cannot map an arena of " + std::to_string(nbytes) + " bytes: " +
              std::generic_category().message(error) + " (errno " + std::to_string(error) + ")") {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

// Without MAP_NORESERVE: what exceeds the machine is refused here, not killed at first touch.
void* map_anonymous(std::size_t nbytes) {
  void* base = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return base == MAP_FAILED ? nullptr : base;
}

}  // namespace

Leases::Leases(std::size_t slots)
    : slots_(slots), counts_(new std::atomic<std::int64_t>[slots]()) {}

std::atomic<std::int64_t>& Leases::counter(std::size_t slot) const {
  if (slot >= slots_) {
    throw std::out_of_range("slot " + std::to_string(slot) + " of " + std::to_string(slots_));
  }
  return counts_[slot];
}

std::int64_t Leases::count(std::size_t slot) const {
  return counter(slot).load(std::memory_order_acquire);
}

void Leases::take(std::size_t slot) { counter(slot).fetch_add(1, std::memory_order_relaxed); }

// Release: what the last holder wrote is visible to whoever sees the count fall.
void Leases::drop(std::size_t slot) { counter(slot).fetch_sub(1, std::memory_order_release); }

struct Arena::Mapping {
  explicit Mapping(std::size_t wanted) : nbytes(round_up(wanted, page_bytes())) {
    if (wanted == 0) throw std::invalid_argument("an arena needs at least one byte");
    if (nbytes == 0) throw MapError(wanted, ENOMEM);
    // Only addresses aligned to the huge page can get one, and not every kernel aligns by itself:
    // map one huge page more and cut the ends off.
    const bool huge = nbytes >= kHugePageBytes &&
                      nbytes <= std::numeric_limits<std::size_t>::max() - kHugePageBytes;
    const std::size_t mapped = huge ? nbytes + kHugePageBytes : nbytes;
    auto* start = static_cast<std::byte*>(map_anonymous(mapped));
    if (start == nullptr) throw MapError(wanted, errno);
    base = start;
    if (!huge) return;
    const auto past = reinterpret_cast<std::uintptr_t>(start) % kHugePageBytes;
    const std::size_t head = past == 0 ? 0 : kHugePageBytes - past;
    base = start + head;
    if (head != 0) ::munmap(start, head);
    if (head != kHugePageBytes) ::munmap(base + nbytes, kHugePageBytes - head);
    ::madvise(base, nbytes, MADV_HUGEPAGE);  // advice only: refused, small pages do as well
  }
  Mapping(std::byte* address, std::size_t wanted, dlpack::Device where,
          std::function<void()> release)
      : nbytes(wanted), base(address), device(where), release_others(std::move(release)) {
    if (wanted == 0) throw std::invalid_argument("an arena needs at least one byte");
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (release_others) {
      release_others();
    } else {
      ::munmap(base, nbytes);
    }
  }

  std::size_t nbytes;
  std::byte* base = nullptr;
  dlpack::Device device = {dlpack::kCpu, 0};
  std::function<void()> release_others;  // of memory that this did not map
  std::atomic<int> pins{0};
};

Arena::Arena(std::size_t nbytes) : mapping_(std::make_shared<Mapping>(nbytes)) {}

Arena::Arena(std::byte* address, std::size_t nbytes, dlpack::Device device,
             std::function<void()> release)
    : mapping_(std::make_shared<Mapping>(address, nbytes, device, std::move(release))) {}

std::size_t Arena::nbytes() const { return mapping_->nbytes; }

std::byte* Arena::address() const { return mapping_->base; }

void Arena::check_range(std::size_t offset, std::size_t nbytes) const {
  if (offset > mapping_->nbytes || nbytes > mapping_->nbytes - offset) {
    throw std::invalid_argument(std::to_string(nbytes) + " bytes at offset " +
                                std::to_string(offset) + " are outside an arena of " +
                                std::to_string(mapping_->nbytes) + " bytes");
  }
}

dlpack::ManagedTensor* Arena::export_tensor(std::size_t offset, std::size_t nbytes,
                                            std::shared_ptr<Leases> leases,
                                            std::size_t slot) const {
  check_range(offset, nbytes);

  struct Export {
    dlpack::ManagedTensor managed;
    std::int64_t shape;
    std::int64_t stride;
    std::shared_ptr<Mapping> mapping;
    std::shared_ptr<Leases> leases;
    std::size_t slot;
  };
  auto holder = std::make_unique<Export>();
  holder->shape = static_cast<std::int64_t>(nbytes);
  holder->stride = 1;
  holder->mapping = mapping_;
  holder->slot = slot;
  if (leases) leases->take(slot);
  holder->leases = std::move(leases);
  holder->managed.tensor = {.data = mapping_->base + offset,
                            .device = mapping_->device,
                            .ndim = 1,
                            .dtype = {dlpack::kUnsignedInt, 8, 1},
                            .shape = &holder->shape,
                            .strides = &holder->stride,
                            .byte_offset = 0};
  holder->managed.manager_context = holder.get();
  holder->managed.deleter = [](dlpack::ManagedTensor* self) {
    std::unique_ptr<Export> done(static_cast<Export*>(self->manager_context));
    if (done->leases) done->leases->drop(done->slot);
  };
  return &holder.release()->managed;
}

void Arena::discard(std::size_t offset, std::size_t nbytes) {
  check_range(offset, nbytes);
  if (mapping_->release_others) {
    throw std::logic_error("the arena's memory is somebody else's: it has no pages to give back");
  }
  // A registered buffer holds the physical pages: after a discard the transfers would go to the
  // old pages and the program would read the new ones.
  if (mapping_->pins.load(std::memory_order_acquire) != 0) {
    throw std::logic_error("the arena is registered with an I/O engine: unregister it first");
  }
  const std::size_t begin = round_up(offset, page_bytes());
  const std::size_t end = (offset + nbytes) / page_bytes() * page_bytes();
  if (begin >= end) return;
  if (::madvise(mapping_->base + begin, end - begin, MADV_DONTNEED) != 0) {
    throw std::system_error(errno, std::generic_category(), "discarding arena pages");
  }
}

std::shared_ptr<const void> Arena::pin() const {
  mapping_->pins.fetch_add(1, std::memory_order_acq_rel);
  return {mapping_->base, [mapping = mapping_](const void*) {
            mapping->pins.fetch_sub(1, std::memory_order_acq_rel);
          }};
}

}  // namespace hetero
