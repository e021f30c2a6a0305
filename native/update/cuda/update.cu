// The optimizer's update and sums of squares on a GPU.
//
// The arithmetic is the CPU's own templates over one lane of plain C++ (vec_scalar.h), so there is
// one text of each formula, and the same bits: compiled without contraction of products and sums,
// and with IEEE's roots and quotients. Here is only how threads take elements and memory is read.
//
// NVRTC compiles this at run time for one kind of update (HETERO_KIND, its number); the headers are
// given to it by name. It compiles as C++ for the host as well, where tests compare it with the
// kernels of the CPU. Threads need each other only where states are in 8 bits: those of a state
// block, which are half a warp, find its largest magnitude together.
#pragma once

#include <cstddef>
#include <cstdint>

// Not every compiler of device code knows these, and here they are of no use.
#define __builtin_prefetch(...) static_cast<void>(0)
#define __builtin_memcpy std::memcpy
#include <cstring>

#include "update/cuda/group.h"
#include "update/kernels/sum_of_squares.inl.h"
#include "update/kernels/update_kernel.inl.h"
#include "update/isa/vec_scalar.h"
#undef __builtin_prefetch
#undef __builtin_memcpy

namespace hetero::cuda {

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

// The part of a segment that a thread updates.
struct SegmentShare {
  const UpdateSegment& segment;
  const UpdateArrays tile;
  const Share share;
  const std::uint64_t at;  // number of its first element in the tile
  const bool whole;        // a Group of each array, aligned

  SegmentShare(const UpdateBatch& batch, unsigned block, unsigned thread)
      : segment(batch.segment[segment_of(batch, block)]),
        tile(batch.tiles[segment.tile]),
        share(segment.numel, block - segment.first_block, thread),
        at(segment.first + share.first),
        whole(share.count == kGroup && segment.first % kGroup == 0) {}
};

// What all kinds read and write beside states.
template <UpdateKind kind>
struct ParamGroups {
  static constexpr std::size_t param_size = kind.param_bytes();
  static constexpr std::size_t grad_size = element_bytes(kind.grad_dtype);
  static constexpr std::size_t master_size = kind.changed_master_bytes();

  Group<param_size> param;
  Group<grad_size> grad;
  Group<master_size> master;

  void load(const SegmentShare& its) {
    param.load(its.tile.param + its.at * param_size, its.whole, its.share.count);
    grad.load(its.tile.grad + its.at * grad_size, its.whole, its.share.count);
    master.load(its.tile.master + its.at * master_size, its.whole, its.share.count);
  }

  void store(const SegmentShare& its) const {
    param.store(its.tile.param + its.at * param_size, its.whole, its.share.count);
    master.store(its.tile.master + its.at * master_size, its.whole, its.share.count);
  }

  UpdateArrays arrays(unsigned i) { return {param.at(i), grad.at(i), master.at(i), {}}; }
};

// What a thread does with states that are no codes.
template <UpdateKind kind>
void update_group(const UpdateBatch& batch, unsigned block, unsigned thread) {
  constexpr std::size_t state_size = state_bytes(kind.state_dtype, 1);
  constexpr std::size_t second_size = kind.states() == 2 ? state_size : 0;
  const SegmentShare its(batch, block, thread);
  if (its.share.count == 0) return;

  ParamGroups<kind> groups;
  Group<state_size> first;
  Group<second_size> second;
  groups.load(its);
  first.load(its.tile.states[0] + its.at * state_size, its.whole, its.share.count);
  second.load(its.tile.states[1] + its.at * second_size, its.whole, its.share.count);

  const UpdateConstants constants = batch.constants[its.segment.constants];
#pragma unroll
  for (unsigned i = 0; i < kGroup; ++i) {
    RandomBits<VecScalar> random_bits(its.segment.index + its.share.first + i,
                                      constants.random_key);
    UpdateArrays arrays = groups.arrays(i);
    arrays.states[0] = first.at(i);
    arrays.states[1] = second.at(i);
    update_vector<VecScalar, kind>(arrays, constants, random_bits);
  }

  groups.store(its);
  first.store(its.tile.states[0] + its.at * state_size, its.whole, its.share.count);
  second.store(its.tile.states[1] + its.at * second_size, its.whole, its.share.count);
}

// The largest magnitudes in a state block, in bits: a maximum has no order.
struct Largest {
  std::uint32_t all = 0;
  std::uint32_t number = 0;  // without what becomes an infinity or a NaN

  static std::uint32_t of(std::uint32_t x, std::uint32_t y) { return x > y ? x : y; }
  void join(const Largest& other) {
    all = of(all, other.all);
    number = of(number, other.number);
  }
};

// States in 8 bits: a state block has kBlockThreads threads, which update kGroup elements each, and
// then make codes with the largest magnitude of them all. As update_state_block(), which see.
inline constexpr unsigned kBlockThreads = kStateBlockNumel / kGroup;

template <UpdateKind kind>
class CodesUpdate {
  static constexpr std::size_t last = kind.states() - 1;
  template <std::size_t state>
  using Block = StateBlock<VecScalar, kind.is_signed(state)>;

 public:
  CodesUpdate(const UpdateBatch& batch, unsigned block, unsigned thread)
      : its_(batch, block, thread),
        number_(thread % kBlockThreads),
        constants_(batch.constants[its_.segment.constants]) {}

  // Whether the segment has nothing of the state block: for all threads of it.
  bool is_outside() const { return its_.share.first - number_ * kGroup >= its_.segment.numel; }

  void update() {
    ParamGroups<kind> groups;
    groups.load(its_);
    if constexpr (kind.moves_states()) {
      decode<0>();
      if constexpr (last == 1) decode<1>();
    }
#pragma unroll
    for (unsigned i = 0; i < kGroup; ++i) {
      float states[kind.states()] = {};
      for (std::size_t state = 0; state <= last; ++state) states[state] = kept_[state][i];
      auto carry = VecScalar::set_bits(0);
      update_param<VecScalar, kind>(groups.arrays(i), constants_, states, carry);
      kept_[0][i] = Block<0>::kept(states[0]);
      if constexpr (last == 1) kept_[1][i] = Block<1>::kept(states[1]);
    }
    groups.store(its_);
  }

  template <std::size_t state>
  Largest largest() const {
    Largest found;
#pragma unroll
    for (unsigned i = 0; i < kGroup; ++i) {
      const std::uint32_t bits = Block<state>::magnitude(kept_[state][i]);
      found.join({bits, bits < Block<state>::infinite ? bits : 0});
    }
    return found;
  }

  // `largest` is that of all threads of the state block.
  template <std::size_t state>
  void encode(const Largest& largest) const {
    alignas(float) char scale[sizeof(float)];
    const auto by = Block<state>::store_scale(scale, largest.number,
                                              largest.all >= Block<state>::infinite);
    Group<1> codes;
#pragma unroll
    for (unsigned i = 0; i < kGroup; ++i) {
      std::uint32_t random = RandomBits<VecScalar>(its_.segment.index + its_.share.first + i,
                                                   constants_.random_key)
                                 .next();
      if constexpr (state == 1) random = random >> (32 - Block<state>::dropped);
      Block<state>::encode(codes.at(i), kept_[state][i], by, random & Block<state>::random_mask);
    }
    if (number_ == 0) {
      *reinterpret_cast<std::uint32_t*>(block<state>()) = *reinterpret_cast<std::uint32_t*>(scale);
    }
    codes.store(codes_at<state>(), its_.whole, its_.share.count);
  }

 private:
  // Segments begin with a state block, so this thread's is before its first element.
  template <std::size_t state>
  char* block() const {
    return its_.tile.states[state] + state_bytes(kind.state_dtype, its_.at - number_ * kGroup);
  }
  template <std::size_t state>
  char* codes_at() const {
    return block<state>() + Block<state>::codes_at + number_ * kGroup;
  }

  template <std::size_t state>
  void decode() {
    const std::uint32_t bits = *reinterpret_cast<const std::uint32_t*>(block<state>());
    const auto scale = Block<state>::Scale::load(reinterpret_cast<const char*>(&bits));
    Group<1> codes;
    codes.load(codes_at<state>(), its_.whole, its_.share.count);
#pragma unroll
    for (unsigned i = 0; i < kGroup; ++i) {
      kept_[state][i] = Block<state>::decode(codes.at(i), scale);
    }
  }

  const SegmentShare its_;
  const unsigned number_;  // of the thread, among those of the state block
  const UpdateConstants constants_;
  float kept_[kind.states()][kGroup] = {};  // states, then what is kept of them
};

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

}  // namespace hetero::cuda

#ifdef HETERO_KIND

namespace hetero::cuda {
inline constexpr UpdateKind kKind = kind_of(HETERO_KIND);

// That of the threads of this one's state block, all of which call this.
inline Largest of_state_block(Largest largest) {
  const unsigned first_lane = threadIdx.x % 32 / kBlockThreads * kBlockThreads;
  const unsigned lanes = ((1U << kBlockThreads) - 1) << first_lane;
#pragma unroll
  for (unsigned apart = kBlockThreads / 2; apart > 0; apart /= 2) {
    largest.join({__shfl_xor_sync(lanes, largest.all, apart),
                  __shfl_xor_sync(lanes, largest.number, apart)});
  }
  return largest;
}
}  // namespace hetero::cuda

extern "C" {

__global__ void hetero_update(const __grid_constant__ hetero::cuda::UpdateBatch batch) {
  constexpr auto kind = hetero::cuda::kKind;
  if constexpr (kind.state_dtype == hetero::StateDtype::eight_bit) {
    hetero::cuda::CodesUpdate<kind> its(batch, blockIdx.x, threadIdx.x);
    if (its.is_outside()) return;
    its.update();
    if constexpr (kind.moves_states()) {
      its.template encode<0>(hetero::cuda::of_state_block(its.template largest<0>()));
      if constexpr (kind.states() == 2) {
        its.template encode<1>(hetero::cuda::of_state_block(its.template largest<1>()));
      }
    }
  } else {
    hetero::cuda::update_group<kind>(batch, blockIdx.x, threadIdx.x);
  }
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

}  // extern "C"

#endif
