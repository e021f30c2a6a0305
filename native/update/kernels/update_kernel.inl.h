// The update of an array, written once over a vector type, a rule and the dtypes.
//
// update_rules.inl.h has the formulas, split_master.inl.h and state_codec.inl.h how the numbers are
// kept. The order of operations is the same for every instruction set, no lane sees its neighbours,
// and an element's random bits come from its number; so the bits of the result do not depend on the
// instruction set, on threads, or on where blocks begin. (The payload of a NaN may.)
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
#include "update/kernels/random_bits.inl.h"
#include "update/kernels/split_master.inl.h"
#include "update/kernels/state_codec.inl.h"
#include "update/kernels/update_rules.inl.h"
#include "update/kernels/vectors.inl.h"

namespace hetero {

// One vector: load, update, store. Inlined by force, as apply_rule().
template <class V, UpdateKind kind>
[[gnu::always_inline]] inline void update_vector(const UpdateArrays& at,
                                                 const UpdateConstants& constants,
                                                 RandomBits<V>& random_bits) {
  constexpr std::size_t last = kind.states() - 1;
  using First = StateCodec<V, kind.state_dtype, kind.carrier(0)>;
  using Last = StateCodec<V, kind.state_dtype, kind.carrier(last)>;

  const auto g = load_as_fp32<V, kind.grad_dtype>(at.grad);
  typename V::F states[kind.states()];
  const auto last_bits = Last::load(at.states[last]);
  states[last] = Last::value(last_bits);
  if constexpr (last == 1) states[0] = First::value(First::load(at.states[0]));

  auto carry = V::set_bits(0);
  if constexpr (kind.rule == Rule::muon_momentum) {
    const auto direction = muon_direction<V>(constants, g, states[0]);
    V::store_u16(at.param, SplitMaster<V>::of(direction).param);
    carry = Last::carry(last_bits);  // the master stays as it is
  } else if constexpr (kind.dtype == Dtype::bf16) {
    auto w =
        SplitMaster<V>::join(V::load_u16(at.param), V::load_u16(at.master), Last::carry(last_bits));
    apply_rule<V, kind.rule>(constants, g, w, states);
    const auto split = SplitMaster<V>::of(w);
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

  auto random = V::set_bits(0);
  if constexpr (kind.state_dtype == Dtype::bf16) random = random_bits.next();
  if constexpr (last == 1) {
    First::store(at.states[0], First::round(states[0], random));
    random = random >> 16;
  }
  Last::store(at.states[last], Last::with_carry(Last::round(states[last], random), carry));
}

template <class V, UpdateKind kind>
void update_block(const UpdateArrays& at, std::size_t numel, const UpdateConstants& constants,
                  std::uint64_t index) {
  constexpr std::size_t state_size = element_bytes(kind.state_dtype);
  constexpr std::size_t second_size = kind.states() == 2 ? state_size : 0;
  const UpdateConstants here = constants;  // a copy, which the stores cannot change
  RandomBits<V> random_bits(index, constants.random_key);
  for_vectors<V, kind.param_bytes(), element_bytes(kind.grad_dtype), kind.changed_master_bytes(),
              state_size, second_size>(
      numel,
      [&](char* param, const char* grad, char* master, char* first, char* second)
          __attribute__((always_inline)) {
            update_vector<V, kind>({param, grad, master, {first, second}}, here, random_bits);
          },
      at.param, at.grad, at.master, at.states[0], at.states[1]);
}

}  // namespace hetero
