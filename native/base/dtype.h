// Element types of parameters, gradients and optimizer states.
//
// Part of kernels.h: nothing here may define a function that is not constexpr.
#pragma once

#include <cstddef>

namespace hetero {

enum class Dtype { fp32, bf16, fp16 };
inline constexpr std::size_t kDtypes = 3;

constexpr const char* name_of(Dtype dtype) {
  return dtype == Dtype::fp32 ? "fp32" : dtype == Dtype::bf16 ? "bf16" : "fp16";
}

constexpr std::size_t element_bytes(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : 2; }

// Bytes per element of what a parameter of this type needs beside itself to be an fp32 master:
// nothing, the 16 bits that bf16 lacks, or a whole copy (fp16 is not a prefix of fp32).
constexpr std::size_t master_bytes(Dtype dtype) {
  return dtype == Dtype::fp32 ? 0 : dtype == Dtype::bf16 ? 2 : 4;
}

}  // namespace hetero
