#include "update/update.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/float_state.h"
#include "base/worker_pool.h"
#include "update/isa/isa.h"

namespace hetero {
namespace {

static_assert(kBlockNumel % kStateBlockNumel == 0, "threads would share a state block");

void require(bool holds, const char* name, double value, const char* range) {
  if (holds) return;
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  throw std::invalid_argument(std::string("Hyper: ") + name + " is " + text + ", must be " + range);
}

// The key of an update's random bits: the output of SplitMix64 (Steele, Lea and Flood, 2014) number
// `step`. It must not depend on more than the step: not on the layout, not on the rank.
std::uint32_t random_key(std::int64_t step) {
  std::uint64_t x = static_cast<std::uint64_t>(step) * 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return static_cast<std::uint32_t>((x ^ (x >> 31)) >> 32);
}

double minus_step_size(Rule rule, const Hyper& hyper) {
  const auto step = static_cast<double>(hyper.step);
  switch (rule) {
    case Rule::adam:
      return -(hyper.lr / (hyper.bias_correction ? 1.0 - std::pow(hyper.beta1, step) : 1.0));
    case Rule::lion:
    case Rule::sgd:
      return -hyper.lr;
    case Rule::muon:
    case Rule::muon_momentum:
      return -(hyper.lr * hyper.lr_scale);
    case Rule::adagrad:
      return -(hyper.lr / (1.0 + (step - 1.0) * hyper.lr_decay));
  }
  throw std::logic_error("unknown rule");
}

void check_decay(Rule rule, const Hyper& hyper) {
  const bool decays_weights =
      rule == Rule::lion || rule == Rule::muon || rule == Rule::muon_momentum;
  if (decays_weights && !hyper.decoupled && hyper.weight_decay != 0) {
    throw std::invalid_argument("Hyper: weight_decay is " + std::to_string(hyper.weight_decay) +
                                " and decoupled is False, but lion and muon decay the weights: "
                                "pass decoupled=True");
  }
  if ((rule == Rule::adagrad || rule == Rule::sgd) && hyper.decoupled) {
    throw std::invalid_argument(
        "Hyper: decoupled is True, but adagrad and sgd add the decay to the gradient: pass "
        "decoupled=False");
  }
}

Direction direction_of(const Hyper& hyper) {
  if (hyper.momentum == 0) return Direction::gradient;
  return hyper.nesterov ? Direction::nesterov : Direction::momentum;
}

const Kernels::Splits& splits(const UpdateKind& kind) {
  const auto column = static_cast<std::size_t>(kind.state_dtype);
  switch (kind.carrier(kind.states() - 1)) {
    case Carrier::sign:
      return kernels().sign_carrier[column];
    case Carrier::lowest:
      return kernels().lowest_carrier[column];
    case Carrier::remainder:
      return kernels().remainder_carrier;
    case Carrier::none:
      break;
  }
  throw std::invalid_argument("only a bf16 parameter's master is split, and the kind's dtype is " +
                              std::string(name_of(kind.dtype)));
}

SplitArrays advanced(const SplitArrays& at, const UpdateKind& kind, std::size_t numel) {
  const bool has_array = kind.state_dtype != StateDtype::eight_bit;
  return {at.param + 2 * numel, at.remainder + 2 * numel,
          has_array ? at.carrier + state_bytes(kind.state_dtype, numel) : nullptr};
}

const Kernels::StateBlocks& state_blocks(const UpdateKind& kind, std::size_t state) {
  if (kind.state_dtype != StateDtype::eight_bit || state >= kind.states()) {
    throw std::invalid_argument("state " + std::to_string(state) +
                                " of the kind, whose states are " + name_of(kind.state_dtype) +
                                ", is not kept in state blocks");
  }
  return kind.is_signed(state) ? kernels().signed_blocks : kernels().root_blocks;
}

}  // namespace

void Hyper::validate() const {
  require(std::isfinite(lr) && lr >= 0, "lr", lr, "finite and at least 0");
  require(std::isfinite(weight_decay) && weight_decay >= 0, "weight_decay", weight_decay,
          "finite and at least 0");
  require(beta1 >= 0 && beta1 < 1, "beta1", beta1, "in [0, 1)");
  require(beta2 >= 0 && beta2 < 1, "beta2", beta2, "in [0, 1)");
  require(std::isfinite(eps) && eps >= 0, "eps", eps, "finite and at least 0");
  require(std::isfinite(lr_decay) && lr_decay >= 0, "lr_decay", lr_decay, "finite and at least 0");
  require(std::isfinite(momentum) && momentum >= 0, "momentum", momentum, "finite and at least 0");
  require(std::isfinite(dampening), "dampening", dampening, "finite");
  require(!nesterov || momentum > 0, "momentum", momentum, "more than 0 with nesterov");
  require(!nesterov || dampening == 0, "dampening", dampening, "0 with nesterov");
  require(std::isfinite(lr_scale) && lr_scale >= 0, "lr_scale", lr_scale, "finite and at least 0");
  require(step >= 1, "step", static_cast<double>(step), "at least 1");
  require(std::isfinite(grad_scale), "grad_scale", grad_scale, "finite");
}

UpdateConstants make_constants(const UpdateKind& kind, const Hyper& hyper) {
  check_decay(kind.rule, hyper);
  const FloatState ieee;
  const double correction2 =
      hyper.bias_correction ? 1.0 - std::pow(hyper.beta2, static_cast<double>(hyper.step)) : 1.0;
  // The first step's buffer is the gradient, as torch's is.
  const double dampening = hyper.step == 1 ? 0.0 : hyper.dampening;
  const Decay decay = hyper.weight_decay == 0 ? Decay::none
                      : hyper.decoupled       ? Decay::decoupled
                                              : Decay::coupled;
  // Muon's directions were made of gradients that had been scaled.
  const double grad_scale = kind.rule == Rule::muon ? 1.0 : hyper.grad_scale;
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
      .minus_step_size = static_cast<float>(minus_step_size(kind.rule, hyper)),
      .momentum = static_cast<float>(hyper.momentum),
      .one_minus_dampening = static_cast<float>(1.0 - dampening),
      .one_minus_momentum = static_cast<float>(1.0 - hyper.momentum),
      .direction = direction_of(hyper),
      .decay = decay,
      .random_key = random_key(hyper.step),
  };
}

UpdateArrays advanced(UpdateArrays at, const UpdateKind& kind, std::size_t numel) {
  at.param += numel * kind.param_bytes();
  at.grad += numel * element_bytes(kind.grad_dtype);
  at.master += numel * master_bytes(kind.dtype);
  for (std::size_t i = 0; i < kind.states(); ++i) {
    at.states[i] += state_bytes(kind.state_dtype, numel);
  }
  return at;
}

UpdateBlocks::UpdateBlocks(const UpdateKind& kind, std::vector<UpdateSlice> slices)
    : kind_(kind), slices_(std::move(slices)), kernel_(kernels().update[number_of(kind)]) {
  std::size_t numel = 0;
  for (std::size_t slice = 0; slice < slices_.size(); ++slice) {
    numel += slices_[slice].numel;
    for (std::size_t first = 0; first < slices_[slice].numel; first += kBlockNumel) {
      blocks_.push_back({slice, first});
    }
  }
  bytes_ = kind.bytes_moved(numel);
}

void UpdateBlocks::compute(std::size_t i) {
  if (i == 0) timeline::mark(begun_);
  const auto& [number, first] = blocks_[i];
  const UpdateSlice& slice = slices_[number];
  kernel_(advanced(slice.at, kind_, first), std::min(kBlockNumel, slice.numel - first),
          slice.constants, slice.index + first);
}

void UpdateBlocks::note_end() const {
  if (begun_ != timeline::Clock::time_point()) timeline::note("update", begun_, bytes_);
}

void update(const UpdateKind& kind, std::vector<UpdateSlice> slices) {
  UpdateBlocks blocks(kind, std::move(slices));
  WorkerPool::instance().run(blocks.count(), [&](std::size_t i) { blocks.compute(i); });
  blocks.note_end();
}

void split_master(const UpdateKind& kind, const char* source, const SplitArrays& at,
                  std::size_t numel) {
  const Kernels::Split kernel = splits(kind).split;
  for_blocks(numel, [&](std::size_t i, std::size_t n) {
    kernel(source + 4 * i, advanced(at, kind, i), n);
  });
}

void join_master(const UpdateKind& kind, const SplitArrays& at, char* target, std::size_t numel) {
  const Kernels::Join kernel = splits(kind).join;
  for_blocks(numel, [&](std::size_t i, std::size_t n) {
    kernel(advanced(at, kind, i), target + 4 * i, n);
  });
}

void encode_state(const UpdateKind& kind, std::size_t state, const char* source, char* blocks,
                  std::size_t numel) {
  const Kernels::Encode kernel = state_blocks(kind, state).encode;
  for_blocks(numel, [&](std::size_t i, std::size_t n) {
    kernel(source + 4 * i, blocks + state_bytes(kind.state_dtype, i), n);
  });
}

void decode_state(const UpdateKind& kind, std::size_t state, const char* blocks, char* target,
                  std::size_t numel) {
  const Kernels::Decode kernel = state_blocks(kind, state).decode;
  for_blocks(numel, [&](std::size_t i, std::size_t n) {
    kernel(blocks + state_bytes(kind.state_dtype, i), target + 4 * i, n);
  });
}

}  // namespace hetero
