// The optimizer's update over the worker pool. update_rules.inl.h states the formulas.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/timeline.h"
#include "update/kernels/kernels.h"
#include "update/update_kind.h"

namespace hetero {

// Hyper-parameters of one update. A rule ignores the fields that it does not have.
struct Hyper {
  double lr = 1e-3;
  double weight_decay = 0.0;
  bool decoupled = false;  // decay the weights, not the gradient
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  bool bias_correction = true;
  double lr_decay = 0.0;
  double momentum = 0.0;
  double dampening = 0.0;  // not in step 1
  bool nesterov = false;
  double lr_scale = 1.0;    // factor on lr, but for weight decay
  std::int64_t step = 1;    // number of the update, from 1
  double grad_scale = 1.0;  // factor on the gradient: unscaling and clipping

  // Throws std::invalid_argument that names the first field out of its range.
  void validate() const;

  bool operator==(const Hyper&) const = default;
};

// Throws std::invalid_argument for a kind of weight decay that the rule does not have. `hyper` has
// been validated.
UpdateConstants make_constants(const UpdateKind& kind, const Hyper& hyper);

// A contiguous run of elements with hyper-parameters of its own.
struct UpdateSlice {
  UpdateArrays at;
  std::size_t numel = 0;
  UpdateConstants constants;
  std::uint64_t index = 0;  // number of the first element, for the random bits of states
};

// The arrays from element `numel` on; with states in 8 bits a multiple of kStateBlockNumel.
UpdateArrays advanced(UpdateArrays at, const UpdateKind& kind, std::size_t numel);

// An update of slices in place, cut into blocks that threads compute on their own.
class UpdateBlocks {
 public:
  UpdateBlocks(const UpdateKind& kind, std::vector<UpdateSlice> slices);

  std::size_t count() const { return blocks_.size(); }
  // Computes block i. Block 0 is begun first.
  void compute(std::size_t i);
  // For the timeline: the last block is computed.
  void note_end() const;

 private:
  struct Block {
    std::size_t slice, first;
  };

  const UpdateKind kind_;
  const std::vector<UpdateSlice> slices_;
  const Kernels::Update kernel_;
  std::vector<Block> blocks_;
  std::uint64_t bytes_ = 0;  // read and written
  timeline::Clock::time_point begun_;
};

// Updates all slices in place, in one use of the worker pool.
void update(const UpdateKind& kind, std::vector<UpdateSlice> slices);

// offload/_native.pyi says what these do. Of a carrier that is a NaN only that it is one is kept.
void split_master(const UpdateKind& kind, const char* source, const SplitArrays& at,
                  std::size_t numel);
void join_master(const UpdateKind& kind, const SplitArrays& at, char* target, std::size_t numel);
// What decode_state() gave becomes the same blocks again.
void encode_state(const UpdateKind& kind, std::size_t state, const char* source, char* blocks,
                  std::size_t numel);
void decode_state(const UpdateKind& kind, std::size_t state, const char* blocks, char* target,
                  std::size_t numel);

}  // namespace hetero
