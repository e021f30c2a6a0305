// Which update: the rule, the types of its arrays, and what follows from them.
//
// Part of kernels.h: nothing here may define a function that is not constexpr.
#pragma once

#include <cstddef>

namespace hetero {

// Element types of parameters, gradients and optimizer states.
enum class Dtype { fp32, bf16, fp16 };
inline constexpr std::size_t kDtypes = 3;

constexpr const char* name_of(Dtype dtype) {
  return dtype == Dtype::fp32 ? "fp32" : dtype == Dtype::bf16 ? "bf16" : "fp16";
}

constexpr std::size_t element_bytes(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : 2; }

// Bytes per element of what a parameter of this type needs beside itself to be an fp32 master:
// nothing, the 16 bits that bf16 lacks, or a whole copy (fp16 is not a prefix of fp32).
constexpr std::size_t master_bytes(Dtype dtype) {
  return dtype == Dtype::fp32 ? 0 : dtype == Dtype::bf16 ? 2 : 4;
}

enum class Rule {
  adam,     // Adam and AdamW; states exp_avg, exp_avg_sq
  lion,     // state exp_avg
  adagrad,  // state sum
  sgd,      // state momentum_buffer
  // Muon's two passes, with the state momentum_buffer; between them directions are orthogonalised.
  muon,           // moves the parameter along its direction, which is in the gradient's place
  muon_momentum,  // updates the momentum, and writes directions, in bf16, to the parameter's place
};
inline constexpr std::size_t kRules = 6;
inline constexpr std::size_t kMaxStates = 2;
inline constexpr std::size_t kStateDtypes = 2;  // fp32 and bf16, the first of Dtype

// Where a bf16 parameter's split keeps its 17th bit (split_master.inl.h): in a bit that the rule's
// last state can spare.
enum class Carrier {
  none,
  sign,    // of a state that is never negative
  lowest,  // bit of the mantissa, which is then a bit shorter
};

struct UpdateKind {
  Dtype dtype = Dtype::fp32;
  Dtype grad_dtype = Dtype::fp32;
  Rule rule = Rule::adam;
  Dtype state_dtype = Dtype::fp32;  // fp32 or bf16

  constexpr std::size_t states() const { return rule == Rule::adam ? 2 : 1; }

  constexpr Carrier carrier(std::size_t state) const {
    if (dtype != Dtype::bf16 || state != states() - 1) return Carrier::none;
    const bool is_signed = rule != Rule::adam && rule != Rule::adagrad;
    return is_signed ? Carrier::lowest : Carrier::sign;
  }

  // Bytes per element of what an update has in the parameter's place.
  constexpr std::size_t param_bytes() const {
    return element_bytes(rule == Rule::muon_momentum ? Dtype::bf16 : dtype);
  }

  // Bytes per element of the optimizer state: what makes the parameter an fp32 master, and the
  // states.
  constexpr std::size_t optim_state_bytes() const {
    return master_bytes(dtype) + states() * element_bytes(state_dtype);
  }

  // Bytes per element of the part of the master beside the parameter that an update changes.
  constexpr std::size_t changed_master_bytes() const {
    return rule == Rule::muon_momentum ? 0 : master_bytes(dtype);
  }

  // Bytes per element that one update moves: optimizer state and parameter in and out, the gradient
  // in. (An fp16 parameter is not read, but storing to it brings it in.)
  constexpr std::size_t bytes_moved() const {
    const std::size_t states_bytes = states() * element_bytes(state_dtype);
    return 2 * (changed_master_bytes() + states_bytes + param_bytes()) + element_bytes(grad_dtype);
  }

  bool operator==(const UpdateKind&) const = default;
};

// Kinds are numbered, for tables.
inline constexpr std::size_t kUpdateKinds = kRules * kDtypes * kDtypes * kStateDtypes;

constexpr std::size_t number_of(const UpdateKind& kind) {
  std::size_t number = static_cast<std::size_t>(kind.rule);
  number = number * kDtypes + static_cast<std::size_t>(kind.dtype);
  number = number * kDtypes + static_cast<std::size_t>(kind.grad_dtype);
  return number * kStateDtypes + static_cast<std::size_t>(kind.state_dtype);
}

constexpr UpdateKind kind_of(std::size_t number) {
  return {.dtype = static_cast<Dtype>(number / (kDtypes * kStateDtypes) % kDtypes),
          .grad_dtype = static_cast<Dtype>(number / kStateDtypes % kDtypes),
          .rule = static_cast<Rule>(number / (kDtypes * kDtypes * kStateDtypes)),
          .state_dtype = static_cast<Dtype>(number % kStateDtypes)};
}

}  // namespace hetero
