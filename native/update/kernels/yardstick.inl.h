// The memory yardstick: the update's access pattern with next to no arithmetic.
#pragma once

#include <cstddef>

#include "update/kernels/kernels.h"
#include "update/kernels/vectors.inl.h"

namespace hetero {

// p += g, m += g, v += g in fp32: four arrays are read and three written, as by fp32 Adam.
template <class V>
void stream_block(const UpdateArrays& at, std::size_t numel) {
  for_vectors<V, 4, 4, 4, 4>(
      numel,
      [](char* p, char* m, char* v, const char* grad) __attribute__((always_inline)) {
        const auto g = V::load(grad);
        for (char* const each : {p, m, v}) V::store(each, V::load(each) + g);
      },
      at.param, at.states[0], at.states[1], at.grad);
}

}  // namespace hetero
