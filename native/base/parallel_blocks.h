// Arrays cut into blocks for the worker pool.
#pragma once

#include <algorithm>
#include <cstddef>

#include "base/worker_pool.h"

namespace hetero {

// What a worker takes at a time: large enough that taking it costs nothing, small enough that the
// threads finish together.
inline constexpr std::size_t kBlockNumel = 64 * 1024;

// Calls body(first, numel) for every block of [0, numel), on the pool.
template <class Body>
void for_blocks(std::size_t numel, Body body) {
  const std::size_t blocks = (numel + kBlockNumel - 1) / kBlockNumel;
  WorkerPool::instance().run(blocks, [&](std::size_t i) {
    const std::size_t first = i * kBlockNumel;
    body(first, std::min(kBlockNumel, numel - first));
  });
}

}  // namespace hetero
