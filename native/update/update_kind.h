// Which update: the rule, the types of its arrays, and what follows from them.
//
// Part of kernels.h: nothing here may define a function that is not constexpr.
#pragma once

#include <cstddef>

namespace hetero {

// Element types of parameters and gradients.
enum class Dtype { fp32, bf16, fp16 };
inline constexpr std::size_t kDtypes = 3;

constexpr const char* name_of(Dtype dtype) {
  return dtype == Dtype::fp32 ? "fp32" : dtype == Dtype::bf16 ? "bf16" : "fp16";
}

constexpr std::size_t element_bytes(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : 2; }

// How the states of a rule are kept. `eight_bit`: in state blocks, each an fp32 scale and a code of
// 8 bits for each element (state_block.inl.h).
enum class StateDtype { fp32, bf16, eight_bit };
inline constexpr std::size_t kStateDtypes = 3;

constexpr const char* name_of(StateDtype dtype) {
  return dtype == StateDtype::fp32 ? "fp32" : dtype == StateDtype::bf16 ? "bf16" : "8bit";
}

// Parameters, tiles and what a thread updates begin at multiples of this many elements, so state
// blocks are the same ones however a model is divided.
inline constexpr std::size_t kStateBlockNumel = 64;
inline constexpr std::size_t kStateBlockBytes = sizeof(float) + kStateBlockNumel;

// Bytes of one state of `numel` elements. A state block may be cut short only by the end of what
// is updated; its bytes are there nevertheless.
constexpr std::size_t state_bytes(StateDtype dtype, std::size_t numel) {
  if (dtype != StateDtype::eight_bit) return numel * (dtype == StateDtype::fp32 ? 4 : 2);
  return (numel + kStateBlockNumel - 1) / kStateBlockNumel * kStateBlockBytes;
}

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
inline constexpr std::size_t kPageBytes = 4096;

// Where a bf16 parameter's split keeps its 17th bit (split_master.inl.h): in a bit that the rule's
// last state can spare. Codes of 8 bits have none.
enum class Carrier {
  none,
  sign,       // of a state that is never negative
  lowest,     // bit of the mantissa, which is then a bit shorter
  remainder,  // the remainder alone says it, because masters on a tie are moved by one unit
};

struct UpdateKind {
  Dtype dtype = Dtype::fp32;
  Dtype grad_dtype = Dtype::fp32;
  Rule rule = Rule::adam;
  StateDtype state_dtype = StateDtype::fp32;

  constexpr std::size_t states() const { return rule == Rule::adam ? 2 : 1; }

  // Whether the state may be negative. (exp_avg_sq and sum are sums of squares.)
  constexpr bool is_signed(std::size_t state) const {
    return rule == Rule::adam ? state == 0 : rule != Rule::adagrad;
  }

  constexpr Carrier carrier(std::size_t state) const {
    if (dtype != Dtype::bf16 || state != states() - 1) return Carrier::none;
    if (state_dtype == StateDtype::eight_bit) return Carrier::remainder;
    return is_signed(state) ? Carrier::lowest : Carrier::sign;
  }

  // Bytes per element of what an update has in the parameter's place.
  constexpr std::size_t param_bytes() const {
    return element_bytes(rule == Rule::muon_momentum ? Dtype::bf16 : dtype);
  }

  // Where state `state` of a tile begins in its optimizer state: behind what makes the parameters
  // fp32 masters, and the states before it.
  constexpr std::size_t state_at(std::size_t state, std::size_t tile_numel) const {
    return tile_numel * master_bytes(dtype) + state * state_bytes(state_dtype, tile_numel);
  }

  // Bytes of a tile's optimizer state, in whole pages, so that it is fit for direct I/O.
  constexpr std::size_t optim_state_bytes(std::size_t tile_numel) const {
    return (state_at(states(), tile_numel) + kPageBytes - 1) / kPageBytes * kPageBytes;
  }

  // Whether an update reads and writes states. (Muon's second pass has no use for its state, but
  // where that has a bit of the master.)
  constexpr bool moves_states() const {
    return rule != Rule::muon || state_dtype != StateDtype::eight_bit;
  }

  // Bytes per element of the part of the master beside the parameter that an update changes.
  constexpr std::size_t changed_master_bytes() const {
    return rule == Rule::muon_momentum ? 0 : master_bytes(dtype);
  }

  // Bytes that one update of `numel` elements moves: optimizer state and parameter in and out, the
  // gradient in. (An fp16 parameter is not read, but storing to it brings it in.)
  constexpr std::size_t bytes_moved(std::size_t numel) const {
    const std::size_t count = moves_states() ? states() : 0;
    const std::size_t states_bytes = count * state_bytes(state_dtype, numel);
    const std::size_t others = 2 * (changed_master_bytes() + param_bytes());
    return 2 * states_bytes + (others + element_bytes(grad_dtype)) * numel;
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
          .state_dtype = static_cast<StateDtype>(number % kStateDtypes)};
}

}  // namespace hetero
