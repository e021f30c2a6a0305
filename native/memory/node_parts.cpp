#include "memory/node_parts.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "base/numa_nodes.h"
#include "base/worker_pool.h"
#include "memory/arena.h"

namespace hetero {
namespace {

#ifdef MADV_POPULATE_WRITE
constexpr int kPopulateWrite = MADV_POPULATE_WRITE;
#else
constexpr int kPopulateWrite = 23;  // of Linux 5.14; the C library's headers may be older
#endif

// What a thread populates at a time: some milliseconds.
constexpr std::size_t kPieceBytes = 16 * kHugePageBytes;

void populate_pages(std::byte* begin, std::byte* end) {
  const std::size_t page = page_bytes();
  begin += (page - reinterpret_cast<std::uintptr_t>(begin) % page) % page;
  end -= reinterpret_cast<std::uintptr_t>(end) % page;
  if (begin >= end) return;
  const auto nbytes = static_cast<std::size_t>(end - begin);
  if (::madvise(begin, nbytes, kPopulateWrite) == 0 || errno != EINVAL) return;
  // The kernel does not know it. Nobody else uses the pages yet, so their bytes may be written
  // back.
  for (; begin < end; begin += page) {
    volatile std::byte& byte = *begin;
    byte = byte;
  }
}

}  // namespace

std::vector<NodePart> node_parts(std::byte* array, std::size_t nbytes, std::size_t nodes) {
  std::vector<NodePart> parts;
  const auto address = reinterpret_cast<std::uintptr_t>(array);
  const auto add = [&](std::uintptr_t end_address, std::size_t node) {
    std::byte* const begin = parts.empty() ? array : parts.back().end;
    parts.push_back({begin, array + (end_address - address), node});
  };
  if (nbytes >= nodes * kHugePageBytes) {
    for (std::size_t node = 0; node + 1 < nodes; ++node) {
      const std::uintptr_t cut = address + (node + 1) * (nbytes / nodes);
      add((cut + kHugePageBytes / 2) / kHugePageBytes * kHugePageBytes, node);
    }
    add(address + nbytes, nodes - 1);
    return parts;
  }
  for (std::uintptr_t at = address; at < address + nbytes;) {
    const std::uintptr_t huge_page = at / kHugePageBytes;
    at = std::min((huge_page + 1) * kHugePageBytes, address + nbytes);
    add(at, huge_page % nodes);
  }
  return parts;
}

void populate(std::span<const NodePart> parts) {
  std::vector<NodePart> pieces;
  for (const NodePart& part : parts) {
    for (std::byte* at = part.begin; at < part.end;) {
      const auto left = static_cast<std::size_t>(part.end - at);
      std::byte* const begin = at;
      at += std::min(left, kPieceBytes);
      pieces.push_back({begin, at, part.node});
    }
  }
  // Most pieces are then taken by threads of their nodes.
  std::stable_sort(pieces.begin(), pieces.end(),
                   [](const NodePart& a, const NodePart& b) { return a.node < b.node; });
  const NumaNodes& nodes = numa_nodes();
  WorkerPool::instance().run(pieces.size(), [&](std::size_t i) {
    const OnNode there(nodes, pieces[i].node % nodes.count());
    populate_pages(pieces[i].begin, pieces[i].end);
  });
}

}  // namespace hetero
