// Sums of squares and means of whole arrays over the worker pool, writes that sum squares on their
// way, and the memory yardstick.
#pragma once

#include <cstddef>
#include <vector>

#include "update/update_kind.h"

namespace hetero {

// Sum of squares in double. The order of the additions is fixed: kNormLanes lanes and a tree within
// runs of kSumNumel elements, then the runs one after another; so the result depends neither on
// threads nor on the instruction set. Finite if and only if every element is finite, because the
// squares of fp32 values are far from overflowing a double.
double sum_of_squares(Dtype dtype, const char* values, std::size_t numel);

// target[i] = (sources[0][i] + sources[1][i] + ...) / count: added in fp32, in this order, and
// rounded once, so that the result depends neither on threads nor on the instruction set. The
// target may be one of the sources. There must be at least one.
void mean(Dtype dtype, const std::vector<const char*>& sources, char* target, std::size_t numel);

// target = source, rounded to nearest even; the bits stay if both have the same dtype. Returns the
// target's sum_of_squares(), which is taken in the same pass over memory. Like add_and_sum(), and
// unlike the others, it is made for callers that are not to wait for an update: while the pool is
// busy the calling thread does all of it.
double copy_and_sum(Dtype source_dtype, const char* source, Dtype dtype, char* target,
                    std::size_t numel);

// target += source: added in fp32 and rounded once to the target's dtype. Returns as above.
double add_and_sum(Dtype source_dtype, const char* source, Dtype dtype, char* target,
                   std::size_t numel);

// The memory yardstick: p += g, m += g, v += g over fp32 arrays, in the blocks and on the threads
// of an update with next to no arithmetic, so its time is the memory's. Moves 28 bytes per element.
void stream(char* p, const char* g, char* m, char* v, std::size_t numel);

}  // namespace hetero
