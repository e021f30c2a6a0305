// The table of inner loops that each instruction set provides. Every table computes the same bits.
//
// This header is included by files compiled for instruction sets that the running machine may not
// have. It and everything else they include must therefore define no function, other than constexpr
// ones, that is shared between them: the linker would keep one copy for everybody.
#pragma once

#include <cstddef>
#include <cstdint>

#include "update/update_kind.h"

namespace hetero {

enum class Decay { none, coupled, decoupled };

// Along what sgd moves a parameter.
enum class Direction { gradient, momentum, nesterov };

// What the formulas need, rounded to fp32 once; update_rules.inl.h states them. A rule leaves alone
// what it has no use for.
struct UpdateConstants {
  float grad_scale;
  float weight_decay;  // coupled
  float shrink;        // decoupled: 1 - lr * weight_decay
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float inv_sqrt_bias_correction2;
  float eps;
  float minus_step_size;
  float momentum;
  float one_minus_dampening;
  float one_minus_momentum;
  Direction direction;
  Decay decay;
  std::uint32_t random_key;  // of the update's random bits
};

// The arrays of one update; addresses need no alignment. No `master` for fp32. States in 8 bits
// begin with a state block.
struct UpdateArrays {
  char* param = nullptr;
  const char* grad = nullptr;
  char* master = nullptr;  // bf16: uint16 remainders; fp16: fp32 values
  char* states[kMaxStates] = {};
};

// The arrays of the bf16 split; the carrier is the rule's last state, or is not used
// (Carrier::remainder).
struct SplitArrays {
  char* param = nullptr;
  char* remainder = nullptr;
  char* carrier = nullptr;
};

// Sums of squares are made in this many lanes: lane j takes the elements i = j (mod kNormLanes).
inline constexpr std::size_t kNormLanes = 32;
// Elements whose lanes become one sum by a tree; the sums are added in order.
inline constexpr std::size_t kSumNumel = 32 * 1024;

// The dtypes whose states have a bit for the carry: fp32 and bf16.
inline constexpr std::size_t kCarrierDtypes = 2;

struct Kernels {
  // `index` is the number of the first element, for its random bits.
  using Update = void (*)(const UpdateArrays&, std::size_t numel, const UpdateConstants&,
                          std::uint64_t index);
  using Split = void (*)(const char* source, const SplitArrays&, std::size_t numel);
  using Join = void (*)(const SplitArrays&, char* target, std::size_t numel);
  using SumOfSquares = double (*)(const char* values, std::size_t numel);
  using Mean = void (*)(const char* const* sources, std::size_t count, std::size_t first,
                        std::size_t numel, char* target);
  // Between fp32 values and state blocks.
  using Encode = void (*)(const char* source, char* blocks, std::size_t numel);
  using Decode = void (*)(const char* blocks, char* target, std::size_t numel);
  using Stream = void (*)(const UpdateArrays&, std::size_t numel);
  // They write the target, and return the sum of squares of what they have written.
  using SummedWrite = double (*)(const char* source, char* target, std::size_t numel);

  // How a carrier is kept; the tables' columns are its dtype.
  struct Splits {
    Split split;
    Join join;
  };
  struct StateBlocks {
    Encode encode;
    Decode decode;
  };

  Update update[kUpdateKinds];  // by number_of(kind)
  Splits sign_carrier[kCarrierDtypes];
  Splits lowest_carrier[kCarrierDtypes];
  Splits remainder_carrier;
  StateBlocks signed_blocks;
  StateBlocks root_blocks;  // of states that are never negative
  SumOfSquares sum_of_squares[kDtypes];
  Mean mean[kDtypes];
  SummedWrite copy_and_sum[kDtypes][kDtypes];  // by the target's dtype and the source's
  SummedWrite add_and_sum[kDtypes][kDtypes];   // likewise
  Stream stream;
};

extern const Kernels scalar_kernels;
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
extern const Kernels neon_kernels;

}  // namespace hetero
