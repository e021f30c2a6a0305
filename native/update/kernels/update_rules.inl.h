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
// and of every rule at last, for each of its states x (m, v, s)
//     x = +0 where |x| < 2^-126, the smallest normal number
//
// with bias_correction{1,2} = 1 - beta{1,2}^step, or 1 without bias correction. Factors that do not
// depend on the element are computed in double and rounded to fp32 once. Square roots and quotients
// are IEEE's, not approximations.
//
// w is updated with m, v and s as computed. Where the gradient stays 0 a state shrinks with every
// step, and would end as a subnormal number that rounding keeps from 0 (0.9 * 4 * 2^-149 rounds to
// itself), at a fraction of the speed. state_codec.inl.h has this last line, and how states are
// rounded when they are stored; that comes after, and 0 stays 0.
#pragma once

#include "update/kernels/kernels.h"

namespace hetero {

// apply(g, w, states) is the formula over one vector; g is not scaled yet.
template <class V, Rule rule>
class UpdateRule;

// The part that the rules share: the gradient's scale, and weight decay.
template <class V>
class ScaleAndDecay {
 public:
  using F = typename V::F;

  explicit ScaleAndDecay(const UpdateConstants& c)
      : decay_(c.decay),
        grad_scale_(V::set(c.grad_scale)),
        factor_(V::set(c.decay == Decay::coupled ? c.weight_decay : c.shrink)) {}

  void apply(F& g, F& w) const {
    g = V::mul(g, grad_scale_);
    if (decay_ == Decay::coupled) g = V::fma(factor_, w, g);
    if (decay_ == Decay::decoupled) w = V::mul(w, factor_);
  }

 private:
  Decay decay_;
  F grad_scale_, factor_;
};

template <class V>
class UpdateRule<V, Rule::adam> {
 public:
  using F = typename V::F;

  explicit UpdateRule(const UpdateConstants& c)
      : first_(c),
        beta1_(V::set(c.beta1)),
        one_minus_beta1_(V::set(c.one_minus_beta1)),
        beta2_(V::set(c.beta2)),
        one_minus_beta2_(V::set(c.one_minus_beta2)),
        inv_sqrt_bias_correction2_(V::set(c.inv_sqrt_bias_correction2)),
        eps_(V::set(c.eps)),
        minus_step_size_(V::set(c.minus_step_size)) {}

  void apply(F g, F& w, F* states) const {
    F& m = states[0];
    F& v = states[1];
    first_.apply(g, w);
    m = V::fma(one_minus_beta1_, g, V::mul(beta1_, m));
    v = V::fma(V::mul(one_minus_beta2_, g), g, V::mul(beta2_, v));
    const F d = V::fma(V::sqrt(v), inv_sqrt_bias_correction2_, eps_);
    w = V::fma(minus_step_size_, V::div(m, d), w);
  }

 private:
  ScaleAndDecay<V> first_;
  F beta1_, one_minus_beta1_, beta2_, one_minus_beta2_;
  F inv_sqrt_bias_correction2_, eps_, minus_step_size_;
};

template <class V>
class UpdateRule<V, Rule::lion> {
 public:
  using F = typename V::F;

  explicit UpdateRule(const UpdateConstants& c)
      : first_(c),
        beta1_(V::set(c.beta1)),
        one_minus_beta1_(V::set(c.one_minus_beta1)),
        beta2_(V::set(c.beta2)),
        one_minus_beta2_(V::set(c.one_minus_beta2)),
        minus_step_size_(V::set(c.minus_step_size)) {}

  void apply(F g, F& w, F* states) const {
    F& m = states[0];
    first_.apply(g, w);
    const F c = V::fma(one_minus_beta1_, g, V::mul(beta1_, m));
    w = V::fma(minus_step_size_, sign(c), w);
    m = V::fma(one_minus_beta2_, g, V::mul(beta2_, m));
  }

 private:
  static F sign(F x) {
    const auto one =
        V::bit_or(V::bit_and(V::bits(x), V::set_bits(0x80000000)), V::set_bits(0x3f800000));
    return V::from_bits(V::if_nan(x, V::bits(x), V::if_zero(x, V::set_bits(0), one)));
  }

  ScaleAndDecay<V> first_;
  F beta1_, one_minus_beta1_, beta2_, one_minus_beta2_, minus_step_size_;
};

template <class V>
class UpdateRule<V, Rule::adagrad> {
 public:
  using F = typename V::F;

  explicit UpdateRule(const UpdateConstants& c)
      : first_(c), eps_(V::set(c.eps)), minus_step_size_(V::set(c.minus_step_size)) {}

  void apply(F g, F& w, F* states) const {
    F& s = states[0];
    first_.apply(g, w);
    s = V::fma(g, g, s);
    w = V::fma(minus_step_size_, V::div(g, V::add(V::sqrt(s), eps_)), w);
  }

 private:
  ScaleAndDecay<V> first_;
  F eps_, minus_step_size_;
};

}  // namespace hetero
