// Means over the worker pool.
#pragma once

#include <cstddef>
#include <vector>

#include "base/dtype.h"

namespace hetero {

// target[i] = (sources[0][i] + sources[1][i] + ...) / count: added in fp32, in this order, and
// rounded once, so that the result depends neither on threads nor on the instruction set. The
// target may be one of the sources. There must be at least one.
void mean(Dtype dtype, const std::vector<const char*>& sources, char* target, std::size_t numel);

}  // namespace hetero
