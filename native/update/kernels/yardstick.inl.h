// The memory yardstick: the update's access pattern with next to no arithmetic.
#pragma once

#include <cstddef>

#include "update/kernels/kernels.h"
#include "update/kernels/load.inl.h"
#include "update/kernels/prefetch.inl.h"

namespace hetero {

template <class V>
void stream_vector(const UpdateArrays& at) {
  const auto g = V::load(at.grad);
  V::store(at.param, V::add(V::load(at.param), g));
  V::store(at.states[0], V::add(V::load(at.states[0]), g));
  V::store(at.states[1], V::add(V::load(at.states[1]), g));
}

// p += g, m += g, v += g in fp32: four arrays are read and three written, as by fp32 Adam.
template <class V>
void stream_block(const UpdateArrays& at, std::size_t numel) {
  constexpr UpdateKind like{};  // fp32 Adam
  constexpr std::size_t step = V::lanes * sizeof(float);
  UpdateArrays here = at;
  std::size_t left = numel;
  for (; left >= V::lanes; left -= V::lanes) {
    prefetch<like>(here);
    stream_vector<V>(here);
    here = {here.param + step,
            here.grad + step,
            nullptr,
            {here.states[0] + step, here.states[1] + step}};
  }
  if (left == 0) return;
  char pads[4][kPadBytes] = {};
  __builtin_memcpy(pads[0], here.param, 4 * left);
  __builtin_memcpy(pads[1], here.grad, 4 * left);
  __builtin_memcpy(pads[2], here.states[0], 4 * left);
  __builtin_memcpy(pads[3], here.states[1], 4 * left);
  stream_vector<V>({pads[0], pads[1], nullptr, {pads[2], pads[3]}});
  __builtin_memcpy(here.param, pads[0], 4 * left);
  __builtin_memcpy(here.states[0], pads[2], 4 * left);
  __builtin_memcpy(here.states[1], pads[3], 4 * left);
}

}  // namespace hetero
