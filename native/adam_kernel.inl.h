// The inner loops, written once over a vector type and instantiated per instruction set.
//
// The update of one element, in IEEE fp32, every product and fma(a, b, c) = a * b + c rounded once:
//
//     g = float(grad) * grad_scale
//     g = fma(weight_decay, w, g)          Adam, if weight_decay != 0
//     w = w * (1 - lr * weight_decay)      AdamW, if weight_decay != 0
//     m = fma(1 - beta1, g, beta1 * m)
//     v = fma((1 - beta2) * g, g, beta2 * v)
//     d = fma(sqrt(v), 1 / sqrt(bias_correction2), eps)
//     w = fma(-(lr / bias_correction1), m / d, w)
//
// with bias_correction{1,2} = 1 - beta{1,2}^step, or 1 without bias correction. Factors that do not
// depend on the element are computed in double and rounded to fp32 once. The order is the same for
// every instruction set, and no lane sees its neighbours, so the bits of the result do not depend
// on the instruction set, on threads, or on where blocks begin. (The payload of a NaN may.)
//
// Where the fp32 master w lives:
//
//     fp32   the parameter is w
//     fp16   w is an array of its own; the parameter is w rounded to nearest even
//     bf16   the parameter p is w rounded to nearest even (the bits of torch's conversion) and
//            `master` keeps the 16 low bits of w. Rounding may have added 1 to the upper half u of
//            w: that carry = p - u goes to the sign bit of exp_avg_sq, which is free because
//            exp_avg_sq >= 0. So w = ((p - carry) << 16) | remainder, exactly. A NaN has remainder
//            and carry 0.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace hetero {

// A block's loops handle whole vectors; what is left over goes through the same code on copies in
// arrays of one vector's length, so that it is computed exactly like the rest.
inline constexpr std::size_t kPadBytes = 16 * sizeof(float);

template <class V, Dtype dtype>
typename V::F load_as_fp32(const char* p) {
  if constexpr (dtype == Dtype::fp32) {
    return V::load(p);
  } else if constexpr (dtype == Dtype::bf16) {
    return V::from_bits(V::template shift_left<16>(V::load_u16(p)));
  } else {
    return V::load_f16(p);
  }
}

// The bf16 split of fp32 masters. `sign` is the carry, moved to bit 31.
template <class V>
struct SplitMaster {
  typename V::U param, remainder, sign;

  static SplitMaster of(typename V::F master) {
    const auto bits = V::bits(master);
    const auto upper = V::template shift_right<16>(bits);
    const auto odd = V::bit_and(upper, V::set_bits(1));
    const auto half = V::add(V::set_bits(0x7fff), odd);
    const auto rounded = V::template shift_right<16>(V::add(bits, half));
    const auto zero = V::set_bits(0);
    return {V::if_nan(master, V::set_bits(0x7fc0), rounded), V::if_nan(master, zero, bits),
            V::if_nan(master, zero, V::template shift_left<31>(V::sub(rounded, upper)))};
  }

  // `exp_avg_sq_bits` carry the sign; their other bits are ignored.
  static typename V::F join(typename V::U param, typename V::U remainder,
                            typename V::U exp_avg_sq_bits) {
    const auto carry = V::template shift_right<31>(exp_avg_sq_bits);
    return V::from_bits(V::bit_or(V::template shift_left<16>(V::sub(param, carry)), remainder));
  }
};

// The formula above over one vector.
template <class V>
class AdamRule {
 public:
  using F = typename V::F;

  explicit AdamRule(const AdamConstants& c)
      : decay_(c.decay),
        grad_scale_(V::set(c.grad_scale)),
        decay_factor_(V::set(c.decay == Decay::coupled ? c.weight_decay : c.shrink)),
        beta1_(V::set(c.beta1)),
        one_minus_beta1_(V::set(c.one_minus_beta1)),
        beta2_(V::set(c.beta2)),
        one_minus_beta2_(V::set(c.one_minus_beta2)),
        inv_sqrt_bias_correction2_(V::set(c.inv_sqrt_bias_correction2)),
        eps_(V::set(c.eps)),
        minus_step_size_(V::set(c.minus_step_size)) {}

  void apply(F g, F& w, F& m, F& v) const {
    g = V::mul(g, grad_scale_);
    if (decay_ == Decay::coupled) g = V::fma(decay_factor_, w, g);
    if (decay_ == Decay::decoupled) w = V::mul(w, decay_factor_);
    m = V::fma(one_minus_beta1_, g, V::mul(beta1_, m));
    v = V::fma(V::mul(one_minus_beta2_, g), g, V::mul(beta2_, v));
    const F d = V::fma(V::sqrt(v), inv_sqrt_bias_correction2_, eps_);
    w = V::fma(minus_step_size_, V::div(m, d), w);
  }

 private:
  Decay decay_;
  F grad_scale_, decay_factor_, beta1_, one_minus_beta1_, beta2_, one_minus_beta2_;
  F inv_sqrt_bias_correction2_, eps_, minus_step_size_;
};

// One vector: load, update, store; the dtype says where the master is. Inlined by force, or the
// loop would load the constants anew for every vector.
template <class V, Dtype dtype, Dtype grad_dtype>
[[gnu::always_inline]] inline void adam_vector(const AdamArrays& at, const AdamRule<V>& rule) {
  const auto g = load_as_fp32<V, grad_dtype>(at.grad);
  auto m = V::load(at.exp_avg);
  auto v = V::load(at.exp_avg_sq);
  if constexpr (dtype == Dtype::bf16) {
    const auto v_bits = V::bits(v);
    auto w = SplitMaster<V>::join(V::load_u16(at.param), V::load_u16(at.master), v_bits);
    v = V::from_bits(V::bit_and(v_bits, V::set_bits(0x7fffffff)));
    rule.apply(g, w, m, v);
    const auto split = SplitMaster<V>::of(w);
    V::store_u16(at.param, split.param);
    V::store_u16(at.master, split.remainder);
    v = V::from_bits(V::bit_or(V::bits(v), split.sign));
  } else if constexpr (dtype == Dtype::fp16) {
    auto w = V::load(at.master);
    rule.apply(g, w, m, v);
    V::store(at.master, w);
    V::store_f16(at.param, w);
  } else {
    auto w = V::load(at.param);
    rule.apply(g, w, m, v);
    V::store(at.param, w);
  }
  V::store(at.exp_avg, m);
  V::store(at.exp_avg_sq, v);
}

// Asks for the cache lines of the elements that are to come: five streams are more than the
// hardware prefetcher keeps up with (measured on Zen 5: +18 % for bf16 out of cache, no change for
// the other types). Asking beyond the end of an array does no harm.
template <Dtype dtype, Dtype grad_dtype>
[[gnu::always_inline]] inline void prefetch(const AdamArrays& at) {
  constexpr std::size_t ahead = 512;  // elements
  __builtin_prefetch(at.param + ahead * element_bytes(dtype), 1);
  __builtin_prefetch(at.grad + ahead * element_bytes(grad_dtype));
  if constexpr (master_bytes(dtype) != 0) {
    __builtin_prefetch(at.master + ahead * master_bytes(dtype), 1);
  }
  __builtin_prefetch(at.exp_avg + ahead * sizeof(float), 1);
  __builtin_prefetch(at.exp_avg_sq + ahead * sizeof(float), 1);
}

template <class V, Dtype dtype, Dtype grad_dtype>
void adam_block(const AdamArrays& at, std::size_t numel, const AdamConstants& constants) {
  constexpr std::size_t param_size = element_bytes(dtype);
  constexpr std::size_t grad_size = element_bytes(grad_dtype);
  constexpr std::size_t master_size = master_bytes(dtype);
  const AdamRule<V> rule(constants);
  AdamArrays here = at;
  std::size_t left = numel;
  for (; left >= V::lanes; left -= V::lanes) {
    prefetch<dtype, grad_dtype>(here);
    adam_vector<V, dtype, grad_dtype>(here, rule);
    here.param += V::lanes * param_size;
    here.grad += V::lanes * grad_size;
    if constexpr (master_size != 0) here.master += V::lanes * master_size;
    here.exp_avg += V::lanes * sizeof(float);
    here.exp_avg_sq += V::lanes * sizeof(float);
  }
  if (left == 0) return;
  char param[kPadBytes] = {}, grad[kPadBytes] = {}, master[kPadBytes] = {};
  char exp_avg[kPadBytes] = {}, exp_avg_sq[kPadBytes] = {};
  __builtin_memcpy(param, here.param, left * param_size);
  __builtin_memcpy(grad, here.grad, left * grad_size);
  if constexpr (master_size != 0) __builtin_memcpy(master, here.master, left * master_size);
  __builtin_memcpy(exp_avg, here.exp_avg, left * sizeof(float));
  __builtin_memcpy(exp_avg_sq, here.exp_avg_sq, left * sizeof(float));
  adam_vector<V, dtype, grad_dtype>({param, grad, master, exp_avg, exp_avg_sq}, rule);
  __builtin_memcpy(here.param, param, left * param_size);
  if constexpr (master_size != 0) __builtin_memcpy(here.master, master, left * master_size);
  __builtin_memcpy(here.exp_avg, exp_avg, left * sizeof(float));
  __builtin_memcpy(here.exp_avg_sq, exp_avg_sq, left * sizeof(float));
}

template <class V>
void split_vector(const char* source, char* param, char* remainder, char* exp_avg_sq) {
  const auto split = SplitMaster<V>::of(V::load(source));
  const auto magnitude = V::bit_and(V::bits(V::load(exp_avg_sq)), V::set_bits(0x7fffffff));
  V::store_u16(param, split.param);
  V::store_u16(remainder, split.remainder);
  V::store(exp_avg_sq, V::from_bits(V::bit_or(magnitude, split.sign)));
}

template <class V>
void split_block(const char* source, char* param, char* remainder, char* exp_avg_sq,
                 std::size_t numel) {
  std::size_t i = 0;
  for (; i + V::lanes <= numel; i += V::lanes) {
    split_vector<V>(source + 4 * i, param + 2 * i, remainder + 2 * i, exp_avg_sq + 4 * i);
  }
  const std::size_t left = numel - i;
  if (left == 0) return;
  char pads[4][kPadBytes] = {};
  __builtin_memcpy(pads[0], source + 4 * i, 4 * left);
  __builtin_memcpy(pads[3], exp_avg_sq + 4 * i, 4 * left);
  split_vector<V>(pads[0], pads[1], pads[2], pads[3]);
  __builtin_memcpy(param + 2 * i, pads[1], 2 * left);
  __builtin_memcpy(remainder + 2 * i, pads[2], 2 * left);
  __builtin_memcpy(exp_avg_sq + 4 * i, pads[3], 4 * left);
}

template <class V>
void join_vector(const char* param, const char* remainder, const char* exp_avg_sq, char* target) {
  V::store(target, SplitMaster<V>::join(V::load_u16(param), V::load_u16(remainder),
                                        V::bits(V::load(exp_avg_sq))));
}

template <class V>
void join_block(const char* param, const char* remainder, const char* exp_avg_sq, char* target,
                std::size_t numel) {
  std::size_t i = 0;
  for (; i + V::lanes <= numel; i += V::lanes) {
    join_vector<V>(param + 2 * i, remainder + 2 * i, exp_avg_sq + 4 * i, target + 4 * i);
  }
  const std::size_t left = numel - i;
  if (left == 0) return;
  char pads[4][kPadBytes] = {};
  __builtin_memcpy(pads[0], param + 2 * i, 2 * left);
  __builtin_memcpy(pads[1], remainder + 2 * i, 2 * left);
  __builtin_memcpy(pads[2], exp_avg_sq + 4 * i, 4 * left);
  join_vector<V>(pads[0], pads[1], pads[2], pads[3]);
  __builtin_memcpy(target + 4 * i, pads[3], 4 * left);
}

// Adds the squares of kNormLanes elements to the lanes' sums.
template <class V, Dtype dtype>
void add_squares(typename V::D* sums, const char* values) {
#pragma GCC unroll 32
  for (std::size_t i = 0; i < kNormLanes; i += V::lanes) {
    V::add_squares(sums + i / V::double_lanes,
                   load_as_fp32<V, dtype>(values + i * element_bytes(dtype)));
  }
}

// Lane j sums its elements in order; a fixed tree adds the lanes. Zeros that pad the end add +0.
template <class V, Dtype dtype>
double sum_of_squares_block(const char* values, std::size_t numel) {
  constexpr std::size_t size = element_bytes(dtype);
  typename V::D sums[kNormLanes / V::double_lanes];
  for (auto& sum : sums) sum = V::zero_double();
  std::size_t i = 0;
  for (; i + kNormLanes <= numel; i += kNormLanes) add_squares<V, dtype>(sums, values + i * size);
  if (i < numel) {
    char pad[kNormLanes * sizeof(float)] = {};
    __builtin_memcpy(pad, values + i * size, (numel - i) * size);
    add_squares<V, dtype>(sums, pad);
  }
  double lanes[kNormLanes];
  for (std::size_t k = 0; k < kNormLanes / V::double_lanes; ++k) {
    V::store_double(lanes + k * V::double_lanes, sums[k]);
  }
  for (std::size_t width = kNormLanes / 2; width > 0; width /= 2) {
    for (std::size_t j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  }
  return lanes[0];
}

template <class V>
constexpr Kernels make_kernels() {
  constexpr Dtype fp32 = Dtype::fp32, bf16 = Dtype::bf16, fp16 = Dtype::fp16;
  static_assert(static_cast<int>(fp32) == 0 && static_cast<int>(bf16) == 1 &&
                static_cast<int>(fp16) == 2);
  return {{{adam_block<V, fp32, fp32>, adam_block<V, fp32, bf16>, adam_block<V, fp32, fp16>},
           {adam_block<V, bf16, fp32>, adam_block<V, bf16, bf16>, adam_block<V, bf16, fp16>},
           {adam_block<V, fp16, fp32>, adam_block<V, fp16, bf16>, adam_block<V, fp16, fp16>}},
          split_block<V>,
          join_block<V>,
          {sum_of_squares_block<V, fp32>, sum_of_squares_block<V, bf16>,
           sum_of_squares_block<V, fp16>}};
}

}  // namespace hetero
