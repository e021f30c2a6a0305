// The table of inner loops that each instruction set provides. Every table computes the same bits.
//
// This header is included by files compiled for instruction sets that the running machine may not
// have. It and everything else they include must therefore define no function, other than constexpr
// ones, that is shared between them: the linker would keep one copy for everybody.
#pragma once

#include <cstddef>

#include "dtype.h"

namespace hetero {

enum class Decay { none, coupled, decoupled };

// What the update formula needs, rounded to fp32 once; adam_kernel.inl.h states the formula.
struct AdamConstants {
  float grad_scale;
  float weight_decay;  // coupled
  float shrink;        // decoupled: 1 - lr * weight_decay
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float inv_sqrt_bias_correction2;
  float eps;
  float minus_step_size;  // -(lr / bias_correction1)
  Decay decay;
};

// The five arrays of one update; addresses need no alignment. No `master` for fp32.
struct AdamArrays {
  char* param = nullptr;
  const char* grad = nullptr;
  char* master = nullptr;  // bf16: uint16 remainders; fp16: fp32 values
  char* exp_avg = nullptr;
  char* exp_avg_sq = nullptr;  // bf16: the sign bit holds the carry of the split
};

// Sums of squares are made in this many lanes: lane j takes the elements i = j (mod kNormLanes).
inline constexpr std::size_t kNormLanes = 32;

struct Kernels {
  using Adam = void (*)(const AdamArrays&, std::size_t numel, const AdamConstants&);
  using Split = void (*)(const char* source, char* param, char* remainder, char* exp_avg_sq,
                         std::size_t numel);
  using Join = void (*)(const char* param, const char* remainder, const char* exp_avg_sq,
                        char* target, std::size_t numel);
  using SumOfSquares = double (*)(const char* values, std::size_t numel);

  Adam adam[kDtypes][kDtypes];  // [dtype][grad_dtype]
  Split split_master;
  Join join_master;
  SumOfSquares sum_of_squares[kDtypes];
};

extern const Kernels scalar_kernels;
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
extern const Kernels neon_kernels;

}  // namespace hetero
