// Fused Adam and AdamW over the worker pool. adam_kernel.inl.h states the formula and its order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "dtype.h"
#include "kernels.h"

namespace hetero {

// Hyper-parameters of one update; `step` counts updates from 1.
struct AdamHyper {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  bool decoupled = false;  // AdamW: decay the weights, not the gradient
  bool bias_correction = true;
  std::int64_t step = 1;

  // Throws std::invalid_argument that names the first field out of its range.
  void validate() const;
};

// Throws std::invalid_argument if grad_scale is not finite. `hyper` has been validated.
AdamConstants make_adam_constants(const AdamHyper& hyper, double grad_scale);

// A contiguous run of elements with hyper-parameters of its own.
struct AdamSlice {
  AdamArrays at;
  std::size_t numel = 0;
  AdamConstants constants;
};

// Updates all slices in place, in one use of the worker pool.
void adam_step(Dtype dtype, Dtype grad_dtype, std::span<const AdamSlice> slices);

// fp32 source -> bf16 param, uint16 remainder, and the carry into the sign bit of exp_avg_sq, whose
// magnitude is kept.
void split_master(const char* source, char* param, char* remainder, char* exp_avg_sq,
                  std::size_t numel);

// The exact fp32 value that split_master took apart.
void join_master(const char* param, const char* remainder, const char* exp_avg_sq, char* target,
                 std::size_t numel);

}  // namespace hetero
