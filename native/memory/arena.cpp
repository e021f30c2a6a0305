#include "memory/arena.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <map>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "base/fork.h"
#include "base/thread_annotations.h"

namespace hetero {

namespace {

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

std::size_t page_bytes() {
  static const auto bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

Pins::Pins(std::size_t slots) : slots_(slots), counts_(new std::atomic<std::int64_t>[slots]()) {}

std::atomic<std::int64_t>& Pins::counter(std::size_t slot) const {
  if (slot >= slots_) {
    throw std::out_of_range("slot " + std::to_string(slot) + " of " + std::to_string(slots_));
  }
  return counts_[slot];
}

std::int64_t Pins::count(std::size_t slot) const {
  return counter(slot).load(std::memory_order_acquire);
}

void Pins::take(std::size_t slot) { counter(slot).fetch_add(1, std::memory_order_relaxed); }

// Release: what the last holder wrote is visible to whoever sees the count fall.
void Pins::drop(std::size_t slot) { counter(slot).fetch_sub(1, std::memory_order_release); }

std::vector<std::size_t> Pins::in_use() const {
  std::vector<std::size_t> found;
  for (std::size_t slot = 0; slot < slots_; ++slot) {
    if (count(slot) != 0) found.push_back(slot);
  }
  return found;
}

// The memory, and how many transfers and page holders use it.
struct Arena::Mapping : std::enable_shared_from_this<Arena::Mapping> {
  Mapping(std::size_t wanted, std::size_t slot_bytes_or_0)
      : nbytes(round_up(wanted, page_bytes())), slot_bytes(slot_bytes_or_0), ours(true) {
    if (wanted == 0) throw std::invalid_argument("an arena needs at least one byte");
    if (nbytes == 0) throw MapError(wanted, ENOMEM);
    // Only addresses aligned to the huge page can get one, and not every kernel aligns by itself:
    // map one huge page more and cut the ends off.
    const bool huge = nbytes >= kHugePageBytes &&
                      nbytes <= std::numeric_limits<std::size_t>::max() - kHugePageBytes;
    const std::size_t mapped = huge ? nbytes + kHugePageBytes : nbytes;
    count_slots();
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
  Mapping(std::byte* address, std::size_t wanted, dlpack::Device where, std::size_t slot_bytes_or_0)
      : nbytes(wanted), slot_bytes(slot_bytes_or_0), ours(false), base(address), device(where) {
    if (wanted == 0) throw std::invalid_argument("an arena needs at least one byte");
    count_slots();
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    {
      const MutexLock lock(process_mutex);
      const auto [first, last] = all.mappings.equal_range(base);
      const auto mine = std::find_if(first, last, [&](const auto& e) { return e.second == this; });
      if (mine != last) all.mappings.erase(mine);
    }
    if (ours) ::munmap(base, nbytes);
    if (release_others) release_others();
  }

  // In a forked child: what is left out there cannot be used, because a tensor that was made before
  // would give zeros without a word. The lock is the child's, which has no other thread.
  static void protect_left_out() NO_THREAD_SAFETY_ANALYSIS {
    for (const auto& [_, mapping] : all.mappings) {
      for (const auto& [begin, nbytes] : mapping->left_out) ::mprotect(begin, nbytes, PROT_NONE);
    }
  }

  // From now on find() knows it. Not in the constructor, before which it has no shared_ptr.
  void enlist() {
    const MutexLock lock(process_mutex);
    all.mappings.emplace(base, this);
  }

  // The one that has the byte, or null.
  static std::shared_ptr<const Mapping> find(const void* address) {
    const auto* const byte = static_cast<const std::byte*>(address);
    const MutexLock lock(process_mutex);
    // Nearly always the first one: ranges overlap only if somebody else's memory is given twice.
    for (auto next = all.mappings.upper_bound(byte); next != all.mappings.begin();) {
      const Mapping& candidate = *(--next)->second;
      if (byte - candidate.base >= static_cast<std::ptrdiff_t>(candidate.nbytes)) continue;
      if (auto found = candidate.weak_from_this().lock()) return found;
    }
    return nullptr;
  }

  // The memory is never given back.
  static void keep(std::shared_ptr<const Mapping> mapping) {
    const MutexLock lock(process_mutex);
    const Mapping& kept = *mapping;
    kept.for_ever = std::move(mapping);
  }

  const std::size_t nbytes;
  std::size_t slot_bytes;
  const bool ours;  // mapped here
  std::byte* base = nullptr;
  const dlpack::Device device = {dlpack::kCpu, 0};
  std::function<void()> release_others;  // of memory that was not mapped here
  std::atomic<int> page_holders{0};
  std::atomic<bool> wiped_on_fork{false};                                // some of it
  std::map<std::byte*, std::size_t> left_out GUARDED_BY(process_mutex);  // of children; whole pages
  const ForkGuard fork{"memory", "use it there, because it is left out here"};
  std::shared_ptr<Pins> transfers;  // by slot

 private:
  struct Registry {
    std::multimap<const std::byte*, const Mapping*> mappings GUARDED_BY(process_mutex);  // by base
  };
  static Registry& all;  // never destroyed: at exit other threads may still use it
  static const int registered;

  mutable std::shared_ptr<const Mapping> for_ever;  // itself, under process_mutex

  void count_slots() {
    if (slot_bytes == 0) slot_bytes = nbytes;
    transfers = std::make_shared<Pins>((nbytes - 1) / slot_bytes + 1);
  }
};

Arena::Mapping::Registry& Arena::Mapping::all = *new Registry;

const int Arena::Mapping::registered = ::pthread_atfork(nullptr, nullptr, protect_left_out);

struct Arena::Export {
  dlpack::ManagedTensor managed;
  std::int64_t shape;
  std::int64_t stride;
  std::shared_ptr<Mapping> mapping;
  std::shared_ptr<Pins> pins;
  std::size_t slot;
};

Arena::Arena(std::size_t nbytes, std::size_t slot_bytes)
    : mapping_(std::make_shared<Mapping>(nbytes, slot_bytes)) {
  mapping_->enlist();
}

Arena::Arena(std::byte* address, std::size_t nbytes, dlpack::Device device,
             std::function<void()> release, std::size_t slot_bytes)
    : mapping_(std::make_shared<Mapping>(address, nbytes, device, slot_bytes)) {
  mapping_->enlist();
  mapping_->release_others = std::move(release);  // last: an exception leaves it to the caller
}

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
                                            std::shared_ptr<Pins> pins, std::size_t slot) const {
  check_range(offset, nbytes);
  if (mapping_->wiped_on_fork) mapping_->fork.require_own();

  auto holder = std::make_unique<Export>();
  holder->shape = static_cast<std::int64_t>(nbytes);
  holder->stride = 1;
  holder->mapping = mapping_;
  holder->slot = slot;
  if (pins) pins->take(slot);
  holder->pins = std::move(pins);
  holder->managed.tensor = {.data = mapping_->base + offset,
                            .device = mapping_->device,
                            .ndim = 1,
                            .dtype = {dlpack::kUnsignedInt, 8, 1},
                            .shape = &holder->shape,
                            .strides = &holder->stride,
                            .byte_offset = 0};
  holder->managed.manager_context = holder.get();
  holder->managed.deleter = [](dlpack::ManagedTensor* self) { end_export(self); };
  return &holder.release()->managed;
}

std::shared_ptr<const Pins> Arena::transfers() const { return mapping_->transfers; }

void Arena::wipe_on_fork(std::size_t offset, std::size_t nbytes) const {
  check_range(offset, nbytes);
  if (!mapping_->ours || nbytes == 0) return;
  mapping_->wiped_on_fork = true;
  std::byte* const begin = mapping_->base + offset / page_bytes() * page_bytes();
  std::byte* const end = mapping_->base + round_up(offset + nbytes, page_bytes());
  const auto pages = static_cast<std::size_t>(end - begin);
  const MutexLock lock(process_mutex);
  // Advice only: Linux before 4.14 does not know it, and copies.
  if (::madvise(begin, pages, MADV_WIPEONFORK) != 0) return;
  std::size_t& known = mapping_->left_out[begin];
  known = std::max(known, pages);
}

std::shared_ptr<const void> Arena::end_export(dlpack::ManagedTensor* tensor) {
  const std::unique_ptr<Export> done(static_cast<Export*>(tensor->manager_context));
  if (done->pins) done->pins->drop(done->slot);
  return std::move(done->mapping);
}

void Arena::discard(std::size_t offset, std::size_t nbytes) {
  check_range(offset, nbytes);
  if (!mapping_->ours) {
    throw std::logic_error("the arena's memory is somebody else's: it has no pages to give back");
  }
  // A registered buffer holds the physical pages: after a discard the transfers would go to the
  // old pages and the program would read the new ones.
  if (mapping_->page_holders.load(std::memory_order_acquire) != 0) {
    throw std::logic_error("the arena is registered with an I/O engine: unregister it first");
  }
  const std::size_t begin = round_up(offset, page_bytes());
  const std::size_t end = (offset + nbytes) / page_bytes() * page_bytes();
  if (begin >= end) return;
  for (std::size_t slot = begin / mapping_->slot_bytes; slot * mapping_->slot_bytes < end; ++slot) {
    if (mapping_->transfers->count(slot) == 0) continue;
    throw std::logic_error("a transfer uses slot " + std::to_string(slot) +
                           " of the arena: its pages cannot be given back before it is done");
  }
  if (::madvise(mapping_->base + begin, end - begin, MADV_DONTNEED) != 0) {
    throw std::system_error(errno, std::generic_category(), "discarding arena pages");
  }
}

std::shared_ptr<const void> Arena::hold_pages() const {
  mapping_->page_holders.fetch_add(1, std::memory_order_acq_rel);
  return {mapping_->base, [mapping = mapping_](const void*) {
            mapping->page_holders.fetch_sub(1, std::memory_order_acq_rel);
          }};
}

Span::Span(std::shared_ptr<const Arena::Mapping> mapping, const void* address, std::size_t nbytes)
    : mapping_(std::move(mapping)) {
  const auto offset =
      static_cast<std::size_t>(static_cast<const std::byte*>(address) - mapping_->base);
  if (nbytes > mapping_->nbytes - offset) {
    throw std::invalid_argument(std::to_string(nbytes) + " bytes at offset " +
                                std::to_string(offset) + " are outside an arena of " +
                                std::to_string(mapping_->nbytes) + " bytes");
  }
  first_slot_ = offset / mapping_->slot_bytes;
  past_slot_ = (offset + nbytes - 1) / mapping_->slot_bytes + 1;
  for (std::size_t slot = first_slot_; slot < past_slot_; ++slot) mapping_->transfers->take(slot);
}

Span Span::of(const void* address, std::size_t nbytes) {
  if (nbytes == 0) return {};
  auto mapping = Arena::Mapping::find(address);
  if (!mapping) {
    throw std::invalid_argument("the " + std::to_string(nbytes) +
                                " bytes of a transfer are in no arena");
  }
  return {std::move(mapping), address, nbytes};
}

Span::Span(Span&& other) noexcept
    : mapping_(std::move(other.mapping_)),
      first_slot_(other.first_slot_),
      past_slot_(other.past_slot_) {}

void Span::release() {
  if (!mapping_) return;
  for (std::size_t slot = first_slot_; slot < past_slot_; ++slot) mapping_->transfers->drop(slot);
  mapping_.reset();
}

void Span::leak() {
  if (mapping_) Arena::Mapping::keep(std::move(mapping_));
}

}  // namespace hetero
