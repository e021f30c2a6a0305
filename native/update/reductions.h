// Sums of squares and means of whole arrays over the worker pool, writes that sum squares on their
// way, and the memory yardstick. offload/_native.pyi says what they compute.
#pragma once

#include <cstddef>
#include <vector>

#include "update/update_kind.h"

namespace hetero {

// The order of the additions: kNormLanes lanes and a tree within runs of kSumNumel elements, then
// the runs one after another. The squares of fp32 values are far from overflowing a double.
double sum_of_squares(Dtype dtype, const char* values, std::size_t numel);

void mean(Dtype dtype, const std::vector<const char*>& sources, char* target, std::size_t numel);

// The bits stay if both have the same dtype. Like add_and_sum(), and unlike the others, it is made
// for callers that are not to wait for an update.
double copy_and_sum(Dtype source_dtype, const char* source, Dtype dtype, char* target,
                    std::size_t numel);

double add_and_sum(Dtype source_dtype, const char* source, Dtype dtype, char* target,
                   std::size_t numel);

void stream(char* p, const char* g, char* m, char* v, std::size_t numel);

}  // namespace hetero
