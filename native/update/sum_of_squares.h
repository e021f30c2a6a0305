// Norms over the worker pool.
#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace hetero {

// Sum of squares in double. The order of the additions is fixed: kNormLanes lanes and a tree within
// blocks of 32 Ki elements, then the blocks one after another; so the result depends neither on
// threads nor on the instruction set. Finite if and only if every element is finite, because the
// squares of fp32 values are far from overflowing a double.
double sum_of_squares(Dtype dtype, const char* values, std::size_t numel);

}  // namespace hetero
