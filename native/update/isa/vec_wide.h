// What vectors of several lanes have in common.
#pragma once

#include "update/isa/vec_operators.h"

namespace hetero {

template <std::size_t count>
struct VecTypes {
  typedef float F __attribute__((vector_size(4 * count)));
  typedef std::uint32_t U __attribute__((vector_size(4 * count)));
  typedef double D __attribute__((vector_size(4 * count)));  // half as many lanes
};

template <std::size_t count>
struct VecWide : VecOperators<typename VecTypes<count>::F, typename VecTypes<count>::U,
                              typename VecTypes<count>::D> {
  using U = typename VecTypes<count>::U;

  static U iota() {
    U numbers;
    for (std::size_t i = 0; i < count; ++i) numbers[i] = static_cast<std::uint32_t>(i);
    return numbers;
  }
};

}  // namespace hetero
