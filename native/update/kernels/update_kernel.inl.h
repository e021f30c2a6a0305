// The update of an array, written once over a vector type, a rule and the dtypes.
//
// update_rules.inl.h has the formulas, split_master.inl.h and state_codec.inl.h how the numbers are
// kept. The order of operations is the same for every instruction set, no lane sees its neighbours,
// and an element's random bits come from its number; so the bits of the result do not depend on the
// instruction set, on threads, or on where blocks begin. (The payload of a NaN may.) States in 8
// bits share a scale with their state block, whose beginning is always the same
// (state_block.inl.h).
//
// Where the fp32 master w lives:
//
//     fp32   the parameter is w
//     fp16   w is an array of its own; the parameter is w rounded to nearest even
//     bf16   parameter, remainder and carry together are w
#pragma once

#include <cstddef>
#include <cstdint>

#include "update/kernels/kernels.h"
#include "update/kernels/split_master.inl.h"
#include "update/kernels/state_block.inl.h"
#include "update/kernels/state_codec.inl.h"
#include "update/kernels/update_rules.inl.h"
#include "update/kernels/vectors.inl.h"

namespace hetero {

// One vector but for how its states are kept: loads, updates and stores the parameter, and updates
// `states`. `carry` is the split's, in and out. Inlined by force, as apply_rule().
template <class V, UpdateKind kind>
[[gnu::always_inline]] inline void update_param(const UpdateArrays& at,
                                                const UpdateConstants& constants,
                                                typename V::F* states, typename V::U& carry) {
  using Split = SplitMaster<V, kind.carrier(kind.states() - 1)>;
  const auto g = load_as_fp32<V, kind.grad_dtype>(at.grad);
  if constexpr (kind.rule == Rule::muon_momentum) {
    const auto direction = muon_direction<V>(constants, g, states[0]);
    using Plain = SplitMaster<V, Carrier::none>;
    V::store_u16(at.param, Plain::of(direction).param);  // the master stays as it is
  } else if constexpr (kind.dtype == Dtype::bf16) {
    const auto remainder = V::load_u16(at.master);
    auto w = Split::join(V::load_u16(at.param), remainder, carry);
    apply_rule<V, kind.rule>(constants, g, w, states);
    const auto split = Split::of(w);
    V::store_u16(at.param, split.param);
    V::store_u16(at.master, split.remainder);
    carry = split.carry;
  } else if constexpr (kind.dtype == Dtype::fp16) {
    auto w = V::load(at.master);
    apply_rule<V, kind.rule>(constants, g, w, states);
    V::store(at.master, w);
    V::store_f16(at.param, w);
  } else {
    auto w = V::load(at.param);
    apply_rule<V, kind.rule>(constants, g, w, states);
    V::store(at.param, w);
  }
}

// One vector: load, update, store.
template <class V, UpdateKind kind>
[[gnu::always_inline]] inline void update_vector(const UpdateArrays& at,
                                                 const UpdateConstants& constants,
                                                 RandomBits<V>& random_bits) {
  constexpr std::size_t last = kind.states() - 1;
  using First = StateCodec<V, kind.state_dtype, kind.carrier(0)>;
  using Last = StateCodec<V, kind.state_dtype, kind.carrier(last)>;

  typename V::F states[kind.states()];
  const auto last_bits = Last::load(at.states[last]);
  states[last] = Last::value(last_bits);
  if constexpr (last == 1) states[0] = First::value(First::load(at.states[0]));
  auto carry = Last::carry(last_bits);
  update_param<V, kind>(at, constants, states, carry);

  auto random = V::set_bits(0);
  if constexpr (kind.state_dtype == StateDtype::bf16) random = random_bits.next();
  if constexpr (last == 1) {
    First::store(at.states[0], First::round(states[0], random));
    random = random >> 16;
  }
  Last::store(at.states[last], Last::with_carry(Last::round(states[last], random), carry));
}

// One whole state block of states in 8 bits. All of it is updated before its codes are made,
// because its scale is not known sooner; meanwhile the new states are in registers, as far as there
// are.
template <class V, UpdateKind kind>
[[gnu::always_inline]] inline void update_state_block(const UpdateArrays& at,
                                                      const UpdateConstants& constants,
                                                      RandomBits<V>& random_bits) {
  constexpr std::size_t last = kind.states() - 1;
  constexpr std::size_t master_size = kind.changed_master_bytes();
  using First = StateBlock<V, kind.is_signed(0)>;
  using Last = StateBlock<V, kind.is_signed(last)>;

  const auto first_scale = First::Scale::load(at.states[0]);
  const auto last_scale = Last::Scale::load(at.states[last]);
  typename V::F first_kept[Last::vectors], last_kept[Last::vectors];
#pragma GCC unroll 4
  for (std::size_t j = 0; j < Last::vectors; ++j) {
    const std::size_t i = j * V::lanes;
    typename V::F states[kind.states()];
    if constexpr (kind.moves_states()) {
      states[last] = Last::decode(at.states[last] + Last::codes_at + i, last_scale);
      if constexpr (last == 1) {
        states[0] = First::decode(at.states[0] + First::codes_at + i, first_scale);
      }
    }
    auto carry = V::set_bits(0);
    update_param<V, kind>({at.param + i * kind.param_bytes(),
                           at.grad + i * element_bytes(kind.grad_dtype),
                           at.master + i * master_size,
                           {}},
                          constants, states, carry);
    if constexpr (kind.moves_states()) {
      last_kept[j] = Last::kept(states[last]);
      if constexpr (last == 1) first_kept[j] = First::kept(states[0]);
    }
  }
  if constexpr (kind.moves_states()) {
    const auto last_by = Last::store_scale(at.states[last], last_kept);
    auto first_by = typename First::Rounding{};
    if constexpr (last == 1) first_by = First::store_scale(at.states[0], first_kept);
#pragma GCC unroll 4
    for (std::size_t j = 0; j < Last::vectors; ++j) {
      const std::size_t codes = Last::codes_at + j * V::lanes;
      auto random = random_bits.next();
      if constexpr (last == 1) {
        First::encode(at.states[0] + codes, first_kept[j], first_by, random & First::random_mask);
        random = random >> (32 - Last::dropped);
      }
      Last::encode(at.states[last] + codes, last_kept[j], last_by, random & Last::random_mask);
    }
  }
}

// Asks for the cache lines of an array's elements that will come with a later state block.
template <class V, std::size_t size>
[[gnu::always_inline]] inline void prefetch_state_block(const char* at) {
  static_assert(kStateBlockNumel == kCacheLineBytes);  // so `size` lines have the elements
  for (std::size_t i = 0; i < size; ++i) {
    __builtin_prefetch(at + 512 * size + i * kCacheLineBytes, 1);
  }
}

// As update_block(), in 8 bits; `numel` may end inside a state block, of which a copy is then used.
template <class V, UpdateKind kind>
[[gnu::always_inline]] inline void update_state_blocks(const UpdateArrays& at, std::size_t numel,
                                                       const UpdateConstants& constants,
                                                       RandomBits<V>& random_bits) {
  constexpr std::size_t param_size = kind.param_bytes();
  constexpr std::size_t grad_size = element_bytes(kind.grad_dtype);
  constexpr std::size_t master_size = kind.changed_master_bytes();
  constexpr std::size_t second = kind.states() - 1;
  UpdateArrays next = at;
  for (; numel >= kStateBlockNumel; numel -= kStateBlockNumel) {
    prefetch_state_block<V, param_size>(next.param);
    prefetch_state_block<V, grad_size>(next.grad);
    prefetch_state_block<V, master_size>(next.master);
    for (std::size_t state = 0; state < kind.states(); ++state) {
      prefetch_state_block<V, 1>(next.states[state]);
    }
    update_state_block<V, kind>(next, constants, random_bits);
    next.param += kStateBlockNumel * param_size;
    next.grad += kStateBlockNumel * grad_size;
    next.master += kStateBlockNumel * master_size;
    for (std::size_t state = 0; state < kind.states(); ++state) {
      next.states[state] += kStateBlockBytes;
    }
  }
  if (numel == 0) return;
  Pad<V, kStateBlockNumel, param_size, char> param(next.param, numel);
  Pad<V, kStateBlockNumel, grad_size, const char> grad(next.grad, numel);
  Pad<V, kStateBlockNumel, master_size, char> master(next.master, numel);
  Pad<V, kStateBlockBytes, 1, char> first_block(next.states[0], sizeof(float) + numel);
  if constexpr (second == 1) {
    Pad<V, kStateBlockBytes, 1, char> second_block(next.states[1], sizeof(float) + numel);
    update_state_block<V, kind>(
        {param.bytes, grad.bytes, master.bytes, {first_block.bytes, second_block.bytes}}, constants,
        random_bits);
  } else {
    update_state_block<V, kind>({param.bytes, grad.bytes, master.bytes, {first_block.bytes}},
                                constants, random_bits);
  }
}

template <class V, UpdateKind kind>
void update_block(const UpdateArrays& at, std::size_t numel, const UpdateConstants& constants,
                  std::uint64_t index) {
  const UpdateConstants here = constants;  // a copy, which the stores cannot change
  RandomBits<V> random_bits(index, constants.random_key);
  if constexpr (kind.state_dtype == StateDtype::eight_bit) {
    update_state_blocks<V, kind>(at, numel, here, random_bits);
  } else {
    constexpr std::size_t state_size = state_bytes(kind.state_dtype, 1);
    constexpr std::size_t second_size = kind.states() == 2 ? state_size : 0;
    for_vectors<V, kind.param_bytes(), element_bytes(kind.grad_dtype), kind.changed_master_bytes(),
                state_size, second_size>(
        numel,
        [&](char* param, const char* grad, char* master, char* first, char* second)
            __attribute__((always_inline)) {
              update_vector<V, kind>({param, grad, master, {first, second}}, here, random_bits);
            },
        at.param, at.grad, at.master, at.states[0], at.states[1]);
  }
}

}  // namespace hetero
