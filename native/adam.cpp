#include "adam.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "float_state.h"
#include "isa.h"
#include "worker_pool.h"

namespace hetero {
namespace {

// What a worker takes at a time: large enough that taking it costs nothing, small enough that the
// threads finish together.
constexpr std::size_t kBlockNumel = 64 * 1024;

void require(bool holds, const char* name, double value, const char* range) {
  if (holds) return;
  throw std::invalid_argument(std::string("AdamHyper: ") + name + " is " + std::to_string(value) +
                              ", must be " + range);
}

// Calls body(first, numel) for every block of [0, numel).
template <class Body>
void for_blocks(std::size_t numel, Body body) {
  const std::size_t blocks = (numel + kBlockNumel - 1) / kBlockNumel;
  WorkerPool::instance().run(blocks, [&](std::size_t i) {
    const std::size_t first = i * kBlockNumel;
    body(first, std::min(kBlockNumel, numel - first));
  });
}

AdamArrays advanced(AdamArrays at, Dtype dtype, Dtype grad_dtype, std::size_t numel) {
  at.param += numel * element_bytes(dtype);
  at.grad += numel * element_bytes(grad_dtype);
  at.master += numel * master_bytes(dtype);
  at.exp_avg += numel * sizeof(float);
  at.exp_avg_sq += numel * sizeof(float);
  return at;
}

}  // namespace

void AdamHyper::validate() const {
  require(std::isfinite(lr) && lr >= 0, "lr", lr, "finite and at least 0");
  require(beta1 >= 0 && beta1 < 1, "beta1", beta1, "in [0, 1)");
  require(beta2 >= 0 && beta2 < 1, "beta2", beta2, "in [0, 1)");
  require(std::isfinite(eps) && eps >= 0, "eps", eps, "finite and at least 0");
  require(std::isfinite(weight_decay) && weight_decay >= 0, "weight_decay", weight_decay,
          "finite and at least 0");
  require(step >= 1, "step", static_cast<double>(step), "at least 1");
}

AdamConstants make_adam_constants(const AdamHyper& hyper, double grad_scale) {
  if (!std::isfinite(grad_scale)) {
    throw std::invalid_argument("grad_scale is " + std::to_string(grad_scale) + ", must be finite");
  }
  const FloatState ieee;
  const auto step = static_cast<double>(hyper.step);
  const double correction1 = hyper.bias_correction ? 1.0 - std::pow(hyper.beta1, step) : 1.0;
  const double correction2 = hyper.bias_correction ? 1.0 - std::pow(hyper.beta2, step) : 1.0;
  const Decay decay = hyper.weight_decay == 0 ? Decay::none
                      : hyper.decoupled       ? Decay::decoupled
                                              : Decay::coupled;
  return {
      .grad_scale = static_cast<float>(grad_scale),
      .weight_decay = static_cast<float>(hyper.weight_decay),
      .shrink = static_cast<float>(1.0 - hyper.lr * hyper.weight_decay),
      .beta1 = static_cast<float>(hyper.beta1),
      .one_minus_beta1 = static_cast<float>(1.0 - hyper.beta1),
      .beta2 = static_cast<float>(hyper.beta2),
      .one_minus_beta2 = static_cast<float>(1.0 - hyper.beta2),
      .inv_sqrt_bias_correction2 = static_cast<float>(1.0 / std::sqrt(correction2)),
      .eps = static_cast<float>(hyper.eps),
      .minus_step_size = static_cast<float>(-(hyper.lr / correction1)),
      .decay = decay,
  };
}

void adam_step(Dtype dtype, Dtype grad_dtype, std::span<const AdamSlice> slices) {
  struct Block {
    const AdamSlice* slice;
    std::size_t first;
  };
  std::vector<Block> blocks;
  for (const AdamSlice& slice : slices) {
    for (std::size_t first = 0; first < slice.numel; first += kBlockNumel) {
      blocks.push_back({&slice, first});
    }
  }
  const Kernels::Adam kernel =
      kernels().adam[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(grad_dtype)];
  WorkerPool::instance().run(blocks.size(), [&](std::size_t i) {
    const auto& [slice, first] = blocks[i];
    kernel(advanced(slice->at, dtype, grad_dtype, first),
           std::min(kBlockNumel, slice->numel - first), slice->constants);
  });
}

void split_master(const char* source, char* param, char* remainder, char* exp_avg_sq,
                  std::size_t numel) {
  const Kernels::Split kernel = kernels().split_master;
  for_blocks(numel, [=](std::size_t i, std::size_t n) {
    kernel(source + 4 * i, param + 2 * i, remainder + 2 * i, exp_avg_sq + 4 * i, n);
  });
}

void join_master(const char* param, const char* remainder, const char* exp_avg_sq, char* target,
                 std::size_t numel) {
  const Kernels::Join kernel = kernels().join_master;
  for_blocks(numel, [=](std::size_t i, std::size_t n) {
    kernel(param + 2 * i, remainder + 2 * i, exp_avg_sq + 4 * i, target + 4 * i, n);
  });
}

}  // namespace hetero
