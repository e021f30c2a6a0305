// The table of one instruction set: every loop, instantiated for a vector type.
#pragma once

#include <cstddef>
#include <utility>

#include "update/kernels/kernels.h"
#include "update/kernels/split_master.inl.h"
#include "update/kernels/state_block.inl.h"
#include "update/kernels/sum_of_squares.inl.h"
#include "update/kernels/update_kernel.inl.h"
#include "update/kernels/writes.inl.h"

namespace hetero {

template <class V, Carrier carrier, StateDtype dtype>
constexpr Kernels::Splits make_splits() {
  return {split_block<V, dtype, carrier>, join_block<V, dtype, carrier>};
}

template <class V, std::size_t... numbers>
constexpr Kernels make_kernels(std::index_sequence<numbers...>) {
  constexpr Dtype fp32 = Dtype::fp32, bf16 = Dtype::bf16, fp16 = Dtype::fp16;
  static_assert(static_cast<int>(fp32) == 0 && static_cast<int>(bf16) == 1 &&
                static_cast<int>(fp16) == 2);
  static_assert(((number_of(kind_of(numbers)) == numbers) && ...));
  return {
      .update = {update_block<V, kind_of(numbers)>...},
      .sign_carrier = {make_splits<V, Carrier::sign, StateDtype::fp32>(),
                       make_splits<V, Carrier::sign, StateDtype::bf16>()},
      .lowest_carrier = {make_splits<V, Carrier::lowest, StateDtype::fp32>(),
                         make_splits<V, Carrier::lowest, StateDtype::bf16>()},
      .remainder_carrier = make_splits<V, Carrier::remainder, StateDtype::eight_bit>(),
      .signed_blocks = {encode_blocks<V, true>, decode_blocks<V, true>},
      .root_blocks = {encode_blocks<V, false>, decode_blocks<V, false>},
      .sum_of_squares = {sum_of_squares_block<V, fp32>, sum_of_squares_block<V, bf16>,
                         sum_of_squares_block<V, fp16>},
      .mean = {mean_block<V, fp32>, mean_block<V, bf16>, mean_block<V, fp16>},
      .copy_and_sum = {{copy_and_sum_block<V, fp32, fp32>, copy_and_sum_block<V, fp32, bf16>,
                        copy_and_sum_block<V, fp32, fp16>},
                       {copy_and_sum_block<V, bf16, fp32>, copy_and_sum_block<V, bf16, bf16>,
                        copy_and_sum_block<V, bf16, fp16>},
                       {copy_and_sum_block<V, fp16, fp32>, copy_and_sum_block<V, fp16, bf16>,
                        copy_and_sum_block<V, fp16, fp16>}},
      .add_and_sum = {{add_and_sum_block<V, fp32, fp32>, add_and_sum_block<V, fp32, bf16>,
                       add_and_sum_block<V, fp32, fp16>},
                      {add_and_sum_block<V, bf16, fp32>, add_and_sum_block<V, bf16, bf16>,
                       add_and_sum_block<V, bf16, fp16>},
                      {add_and_sum_block<V, fp16, fp32>, add_and_sum_block<V, fp16, bf16>,
                       add_and_sum_block<V, fp16, fp16>}},
      .stream = stream_block<V>,
  };
}

template <class V>
constexpr Kernels make_kernels() {
  return make_kernels<V>(std::make_index_sequence<kUpdateKinds>());
}

}  // namespace hetero
