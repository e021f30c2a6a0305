// The optimizer's update, sums of squares, and the split of masters, on a GPU.
//
// The arithmetic is the CPU's own templates over one lane of plain C++ (vec_scalar.h), so there is
// one text of each formula, and the same bits: compiled without contraction of products and sums,
// and with IEEE's roots and quotients. Here is only how threads take elements and memory is read.
//
// NVRTC compiles this at run time for one kind of update (HETERO_KIND, its number); the headers are
// given to it by name. It compiles as C++ for the host as well, where tests compare it with the
// kernels of the CPU. No thread needs another one: of states in 8 bits each takes a whole state block
// (neighbouring threads do not read neighbouring bytes then, which is right, and not fast).
#pragma once

#include <cstddef>
#include <cstdint>

// Not every compiler of device code knows these, and here they are of no use.
#define __builtin_prefetch(...) static_cast<void>(0)
#define __builtin_memcpy std::memcpy
#include <cstring>

#include "update/kernels/sum_of_squares.inl.h"
#include "update/kernels/update_kernel.inl.h"
#include "update/isa/vec_scalar.h"
#undef __builtin_prefetch
#undef __builtin_memcpy

namespace hetero::cuda {

inline constexpr unsigned kThreads = 256;  // of a block of threads
inline constexpr unsigned kGroup = 4;      // elements that a thread reads at once, and updates

// Elements [first, first + numel) of the arrays of a tile. `index` is the number of the first one,
// for its random bits. Blocks of threads from `first_block` on are the segment's.
struct UpdateSegment {
  std::uint64_t first;
  std::uint64_t numel;
  std::uint64_t index;
  std::uint32_t constants;
  std::uint32_t tile;
  std::uint32_t first_block;
  std::uint32_t unused;
};

// All tiles that one launch updates: tables in the device's memory.
struct UpdateBatch {
  const UpdateArrays* tiles;
  const UpdateConstants* constants;
  const UpdateSegment* segment;
  std::uint64_t segments;
};
static_assert(sizeof(UpdateArrays) == 40 && sizeof(UpdateConstants) == 64);
static_assert(sizeof(UpdateSegment) == 40 && sizeof(UpdateBatch) == 32);

// One array whose squares are summed, to `blocks` doubles from number `first_out` on.
struct SumSegment {
  const char* values;
  std::uint64_t numel;
  std::uint32_t first_block;
  std::uint32_t first_out;
};

struct SumBatch {
  double* lanes;              // kNormLanes of each block
  const SumSegment* segment;  // a table in the device's memory, too
  std::uint64_t segments;
};
static_assert(sizeof(SumSegment) == 24 && sizeof(SumBatch) == 24);

// The last segment that begins at `block` or before it.
template <class Batch>
unsigned segment_of(const Batch& batch, unsigned block) {
  unsigned low = 0;
  auto high = static_cast<unsigned>(batch.segments);
  while (high - low > 1) {
    const unsigned middle = (low + high) / 2;
    if (batch.segment[middle].first_block <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <std::size_t size>
struct Wide;
template <>
struct Wide<2> {
  using Element = std::uint16_t;
};
template <>
struct Wide<4> {
  using Element = std::uint32_t;
};

// The elements of one array that a thread works on. `whole`: all of a group, which is aligned.
template <std::size_t size>
struct alignas(kGroup * size) Group {
  using Element = typename Wide<size>::Element;
  Element elements[kGroup];

  char* at(unsigned i) { return reinterpret_cast<char*>(elements + i); }

  void load(const char* from, bool whole, unsigned count) {
    if (whole) {
      *this = *reinterpret_cast<const Group*>(from);
      return;
    }
#pragma unroll
    for (unsigned i = 0; i < kGroup; ++i) {
      elements[i] = i < count ? reinterpret_cast<const Element*>(from)[i] : Element{0};
    }
  }

  void store(char* to, bool whole, unsigned count) const {
    if (whole) {
      *reinterpret_cast<Group*>(to) = *this;
      return;
    }
#pragma unroll
    for (unsigned i = 0; i < kGroup; ++i) {
      if (i < count) reinterpret_cast<Element*>(to)[i] = elements[i];
    }
  }
};
template <>
struct Group<0> {  // of what a kind does not have
  char* at(unsigned) { return nullptr; }
  void load(const char*, bool, unsigned) {}
  void store(char*, bool, unsigned) const {}
};

// What thread `thread` of block `block` does with states in 8 bits, one state block.
template <UpdateKind kind>
void update_state_block_thread(const UpdateBatch& batch, unsigned block, unsigned thread) {
  const UpdateSegment& segment = batch.segment[segment_of(batch, block)];
  const std::uint64_t offset =
      (static_cast<std::uint64_t>(block - segment.first_block) * kThreads + thread) *
      kStateBlockNumel;
  if (offset >= segment.numel) return;
  const std::uint64_t left = segment.numel - offset;
  const std::uint64_t at = segment.first + offset;
  UpdateArrays arrays = batch.tiles[segment.tile];
  arrays.param += at * kind.param_bytes();
  arrays.grad += at * element_bytes(kind.grad_dtype);
  arrays.master += at * kind.changed_master_bytes();
  for (std::size_t i = 0; i < kind.states(); ++i) {
    arrays.states[i] += state_bytes(kind.state_dtype, at);
  }
  update_block<VecScalar, kind>(arrays, left < kStateBlockNumel ? left : kStateBlockNumel,
                                batch.constants[segment.constants], segment.index + offset);
}

// What thread `thread` of block `block` does with kGroup elements.
template <UpdateKind kind>
void update_group_thread(const UpdateBatch& batch, unsigned block, unsigned thread) {
  constexpr std::size_t param_size = kind.param_bytes();
  constexpr std::size_t grad_size = element_bytes(kind.grad_dtype);
  constexpr std::size_t master_size = kind.changed_master_bytes();
  constexpr std::size_t state_size = state_bytes(kind.state_dtype, 1);
  constexpr std::size_t second_size = kind.states() == 2 ? state_size : 0;

  const UpdateSegment& segment = batch.segment[segment_of(batch, block)];
  const std::uint64_t offset =
      (static_cast<std::uint64_t>(block - segment.first_block) * kThreads + thread) * kGroup;
  if (offset >= segment.numel) return;
  const std::uint64_t left = segment.numel - offset;
  const unsigned count = left < kGroup ? static_cast<unsigned>(left) : kGroup;
  const bool whole = count == kGroup && segment.first % kGroup == 0;
  const std::uint64_t at = segment.first + offset;

  const UpdateArrays tile = batch.tiles[segment.tile];

  Group<param_size> param;
  Group<grad_size> grad;
  Group<master_size> master;
  Group<state_size> first;
  Group<second_size> second;
  param.load(tile.param + at * param_size, whole, count);
  grad.load(tile.grad + at * grad_size, whole, count);
  master.load(tile.master + at * master_size, whole, count);
  first.load(tile.states[0] + at * state_size, whole, count);
  second.load(tile.states[1] + at * second_size, whole, count);

  const UpdateConstants constants = batch.constants[segment.constants];
#pragma unroll
  for (unsigned i = 0; i < kGroup; ++i) {
    RandomBits<VecScalar> random_bits(segment.index + offset + i, constants.random_key);
    update_vector<VecScalar, kind>(
        {param.at(i), grad.at(i), master.at(i), {first.at(i), second.at(i)}}, constants,
        random_bits);
  }

  param.store(tile.param + at * param_size, whole, count);
  master.store(tile.master + at * master_size, whole, count);
  first.store(tile.states[0] + at * state_size, whole, count);
  second.store(tile.states[1] + at * second_size, whole, count);
}

template <UpdateKind kind>
void update_thread(const UpdateBatch& batch, unsigned block, unsigned thread) {
  if constexpr (kind.state_dtype == StateDtype::eight_bit) {
    update_state_block_thread<kind>(batch, block, thread);
  } else {
    update_group_thread<kind>(batch, block, thread);
  }
}

// Sums of squares as sum_of_squares.inl.h defines them: first every lane of every block, then the
// tree over the lanes, then the blocks of an array in order.

template <Dtype dtype>
void lanes_thread(const SumBatch& batch, unsigned block, unsigned thread) {
  // As many lanes as threads, so a block of threads has several blocks of the sum.
  constexpr unsigned together = kThreads / kNormLanes;
  constexpr std::size_t size = element_bytes(dtype);
  const SumSegment& segment = batch.segment[segment_of(batch, block)];
  const std::uint64_t number =
      static_cast<std::uint64_t>(block - segment.first_block) * together + thread / kNormLanes;
  const unsigned lane = thread % kNormLanes;
  const std::uint64_t begin = number * kSumNumel;
  if (begin >= segment.numel) return;
  const std::uint64_t left = segment.numel - begin;
  const std::uint64_t end = begin + (left < kSumNumel ? left : kSumNumel);
  double sum = 0.0;
#pragma unroll 8
  for (std::uint64_t i = begin + lane; i < end; i += kNormLanes) {
    using Element = typename Wide<size>::Element;
    alignas(4) char bytes[4] = {};
    const Element element = reinterpret_cast<const Element*>(segment.values)[i];
    std::memcpy(bytes, &element, size);
    VecScalar::add_squares(&sum, load_as_fp32<VecScalar, dtype>(bytes));
  }
  batch.lanes[(segment.first_out + number) * kNormLanes + lane] = sum;
}

// Each block's lanes become one sum, which takes the place of the first.
inline void tree_thread(double* lanes, std::uint64_t blocks, unsigned block, unsigned thread) {
  const std::uint64_t number = static_cast<std::uint64_t>(block) * kThreads + thread;
  if (number >= blocks) return;
  double* const mine = lanes + number * kNormLanes;
  for (std::size_t width = kNormLanes / 2; width > 0; width /= 2) {
    for (std::size_t j = 0; j < width; ++j) mine[j] += mine[j + width];
  }
}

// The blocks of an array in order; one thread for each array.
inline void total_thread(const SumBatch& batch, double* totals, unsigned block, unsigned thread) {
  const std::uint64_t number = static_cast<std::uint64_t>(block) * kThreads + thread;
  if (number >= batch.segments) return;
  const SumSegment& segment = batch.segment[number];
  const std::uint64_t blocks = (segment.numel + kSumNumel - 1) / kSumNumel;
  double total = 0.0;
  for (std::uint64_t i = 0; i < blocks; ++i) {
    total += batch.lanes[(segment.first_out + i) * kNormLanes];
  }
  totals[number] = total;
}

template <UpdateKind kind>
void split_thread(const char* source, const SplitArrays& at, std::uint64_t numel, unsigned block,
                  unsigned thread) {
  const std::uint64_t i = static_cast<std::uint64_t>(block) * kThreads + thread;
  if (i >= numel) return;
  constexpr Carrier carrier = kind.carrier(kind.states() - 1);
  constexpr std::size_t size = kCarrierBytes<kind.state_dtype, carrier>;
  split_vector<VecScalar, kind.state_dtype, carrier>(
      source + 4 * i, {at.param + 2 * i, at.remainder + 2 * i, at.carrier + size * i});
}

template <UpdateKind kind>
void join_thread(const SplitArrays& at, char* target, std::uint64_t numel, unsigned block,
                 unsigned thread) {
  const std::uint64_t i = static_cast<std::uint64_t>(block) * kThreads + thread;
  if (i >= numel) return;
  constexpr Carrier carrier = kind.carrier(kind.states() - 1);
  constexpr std::size_t size = kCarrierBytes<kind.state_dtype, carrier>;
  join_vector<VecScalar, kind.state_dtype, carrier>(
      {at.param + 2 * i, at.remainder + 2 * i, at.carrier + size * i}, target + 4 * i);
}

}  // namespace hetero::cuda

#ifdef HETERO_KIND

namespace hetero::cuda {
inline constexpr UpdateKind kKind = kind_of(HETERO_KIND);
}  // namespace hetero::cuda

extern "C" {

__global__ void hetero_update(const __grid_constant__ hetero::cuda::UpdateBatch batch) {
  hetero::cuda::update_thread<hetero::cuda::kKind>(batch, blockIdx.x, threadIdx.x);
}

__global__ void hetero_lanes(const __grid_constant__ hetero::cuda::SumBatch batch) {
  hetero::cuda::lanes_thread<hetero::cuda::kKind.grad_dtype>(batch, blockIdx.x, threadIdx.x);
}

__global__ void hetero_tree(double* lanes, std::uint64_t blocks) {
  hetero::cuda::tree_thread(lanes, blocks, blockIdx.x, threadIdx.x);
}

__global__ void hetero_total(const __grid_constant__ hetero::cuda::SumBatch batch, double* totals) {
  hetero::cuda::total_thread(batch, totals, blockIdx.x, threadIdx.x);
}

__global__ void hetero_split(const char* source, const hetero::SplitArrays at,
                             std::uint64_t numel) {
  if constexpr (hetero::cuda::kKind.dtype == hetero::Dtype::bf16) {
    hetero::cuda::split_thread<hetero::cuda::kKind>(source, at, numel, blockIdx.x, threadIdx.x);
  }
}

__global__ void hetero_join(const hetero::SplitArrays at, char* target, std::uint64_t numel) {
  if constexpr (hetero::cuda::kKind.dtype == hetero::Dtype::bf16) {
    hetero::cuda::join_thread<hetero::cuda::kKind>(at, target, numel, blockIdx.x, threadIdx.x);
  }
}

}  // extern "C"

#endif
