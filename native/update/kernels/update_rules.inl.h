// The formulas: one element's update by each rule, in IEEE fp32, every product and
// fma(a, b, c) = a * b + c rounded once, in this order:
//
//     g = float(grad) * grad_scale
//
//   adam (Adam and AdamW)
//     g = fma(weight_decay, w, g)          coupled (Adam), if weight_decay != 0
//     w = w * (1 - lr * weight_decay)      decoupled (AdamW), if weight_decay != 0
//     m = fma(1 - beta1, g, beta1 * m)
//     v = fma((1 - beta2) * g, g, beta2 * v)
//     d = fma(sqrt(v), 1 / sqrt(bias_correction2), eps)
//     w = fma(-(lr / bias_correction1), m / d, w)
//
//   lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023)
//     w = w * (1 - lr * weight_decay)      if weight_decay != 0
//     c = fma(1 - beta1, g, beta1 * m)
//     w = fma(-lr, sign(c), w)             sign(+-0) = +0, sign(NaN) = NaN
//     m = fma(1 - beta2, g, beta2 * m)
//
//   adagrad (as torch.optim.Adagrad)
//     g = fma(weight_decay, w, g)          if weight_decay != 0
//     s = fma(g, g, s)
//     w = fma(-(lr / (1 + (step - 1) * lr_decay)), g / (sqrt(s) + eps), w)
//
//   sgd (as torch.optim.SGD)
//     g = fma(weight_decay, w, g)          if weight_decay != 0
//     b = fma(1 - dampening, g, momentum * b)  if momentum != 0; dampening is 0 in step 1, so that
//                                          b = 0 becomes g
//     d = g                                if momentum = 0, else
//     d = b                                or with nesterov
//     d = fma(momentum, b, g)
//     w = fma(-lr, d, w)
//
//   muon (as torch.optim.Muon; Jordan et al., "Muon: An optimizer for hidden layers in neural
//   networks", 2024), of which the orthogonalisation of each matrix's d comes in between
//     b = lerp(b, g, 1 - momentum)         where lerp(x, y, t) = fma(t, y - x, x)      if t < 0.5,
//     d = b                                                      fma(t - 1, y - x, y)  else,
//     d = lerp(g, b, momentum)             with nesterov; t - 1 is rounded, too
//     d = orthogonalised d, in bf16, of which no grad_scale is taken
//     w = w * (1 - lr * weight_decay)      if weight_decay != 0
//     w = fma(-(lr * lr_scale), d, w)
//
// and of every rule at last, for each of its states x (m, v, s, b)
//     x = +0 where |x| < 2^-126, the smallest normal number
//
// with bias_correction{1,2} = 1 - beta{1,2}^step, or 1 without bias correction. Factors that do not
// depend on the element are computed in double and rounded to fp32 once. Square roots and quotients
// are IEEE's, not approximations.
//
// w is updated with m, v, s and b as computed. Where the gradient stays 0 a state shrinks with
// every step, and would end as a subnormal number that rounding keeps from 0 (0.9 * 4 * 2^-149
// rounds to itself), at a fraction of the speed. state_codec.inl.h has this last line, and how
// states are rounded when they are stored; that comes after, and 0 stays 0.
#pragma once

#include "update/kernels/kernels.h"

namespace hetero {

template <class V>
typename V::F sign(typename V::F x) {
  const auto one = (V::bits(x) & 0x80000000U) | 0x3f800000U;
  return V::from_bits(V::if_nan(x, V::bits(x), V::if_zero(x, V::set_bits(0), one)));
}

template <class V>
[[gnu::always_inline]] inline typename V::F lerp(typename V::F x, typename V::F y, float weight) {
  const auto distance = y - x;
  if (weight < 0.5F) return V::fma(V::set(weight), distance, x);
  return V::fma(V::set(weight - 1.0F), distance, y);
}

// muon's first pass over one vector; g is not scaled yet. Returns the direction.
template <class V>
[[gnu::always_inline]] inline typename V::F muon_direction(const UpdateConstants& c,
                                                           typename V::F g, typename V::F& b) {
  g = g * c.grad_scale;
  b = lerp<V>(b, g, c.one_minus_momentum);
  return c.direction == Direction::nesterov ? lerp<V>(g, b, c.momentum) : b;
}

// The formula over one vector; g is not scaled yet. Inlined by force, or the loop would load the
// constants anew for every vector.
template <class V, Rule rule>
[[gnu::always_inline]] inline void apply_rule(const UpdateConstants& c, typename V::F g,
                                              typename V::F& w, typename V::F* states) {
  g = g * c.grad_scale;
  if (c.decay == Decay::coupled) g = V::fma(V::set(c.weight_decay), w, g);
  if (c.decay == Decay::decoupled) w = w * c.shrink;
  const auto minus_step_size = V::set(c.minus_step_size);
  if constexpr (rule == Rule::adam) {
    auto &m = states[0], &v = states[1];
    m = V::fma(V::set(c.one_minus_beta1), g, c.beta1 * m);
    v = V::fma(c.one_minus_beta2 * g, g, c.beta2 * v);
    const auto d = V::fma(V::sqrt(v), V::set(c.inv_sqrt_bias_correction2), V::set(c.eps));
    w = V::fma(minus_step_size, m / d, w);
  } else if constexpr (rule == Rule::lion) {
    auto& m = states[0];
    const auto mixed = V::fma(V::set(c.one_minus_beta1), g, c.beta1 * m);
    w = V::fma(minus_step_size, sign<V>(mixed), w);
    m = V::fma(V::set(c.one_minus_beta2), g, c.beta2 * m);
  } else if constexpr (rule == Rule::adagrad) {
    auto& s = states[0];
    s = V::fma(g, g, s);
    w = V::fma(minus_step_size, g / (V::sqrt(s) + c.eps), w);
  } else if constexpr (rule == Rule::muon) {
    w = V::fma(minus_step_size, g, w);
  } else {
    auto& b = states[0];
    const auto momentum = V::set(c.momentum);
    if (c.direction != Direction::gradient) {
      b = V::fma(V::set(c.one_minus_dampening), g, momentum * b);
    }
    if (c.direction == Direction::momentum) g = b;
    if (c.direction == Direction::nesterov) g = V::fma(momentum, b, g);
    w = V::fma(minus_step_size, g, w);
  }
}

}  // namespace hetero
