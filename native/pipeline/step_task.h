// What the step pipeline works on: tiles, where their parts live, and the update of one of them.
//
// A *tile* is the part of a rank's shard in one slot: parameters, gradients and the optimizer
// state, which includes what makes the parameters fp32 masters. Each of the three is either in RAM,
// where it is used in place, or in the file, from where it passes through a *buffer*.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "update/update_kind.h"

namespace hetero {

// What all tiles of a pipeline have in common, and where the parts of a buffer are, in bytes. An
// optimizer state is laid out as [master | state 0 | state 1], and fills whole pages; a buffer as
// [optimizer state | param | grad]. Every part is as long as a whole tile.
struct TileLayout {
  // Throws std::invalid_argument unless tile_numel is a positive multiple of 2048, which makes
  // parameters and gradients, of 2 bytes per element or more, multiples of a page and so fit for
  // direct I/O.
  TileLayout(const UpdateKind& kind, std::size_t tile_numel, bool param_in_file, bool grad_in_file)
      : kind(kind),
        tile_numel(tile_numel),
        param_in_file(param_in_file),
        grad_in_file(grad_in_file) {
    if (tile_numel == 0 || tile_numel % 2048 != 0) {
      throw std::invalid_argument("tile_numel is " + std::to_string(tile_numel) +
                                  ", must be a positive multiple of 2048");
    }
  }

  std::size_t state_at(std::size_t i) const { return kind.state_at(i, tile_numel); }
  std::size_t optim_state_bytes() const { return kind.optim_state_bytes(tile_numel); }
  std::size_t param_bytes() const { return tile_numel * element_bytes(kind.dtype); }
  std::size_t grad_bytes() const { return tile_numel * element_bytes(kind.grad_dtype); }
  std::size_t param_at() const { return optim_state_bytes(); }
  std::size_t grad_at() const { return param_at() + (param_in_file ? param_bytes() : 0); }
  std::size_t buffer_bytes() const { return grad_at() + (grad_in_file ? grad_bytes() : 0); }

  // Throws std::invalid_argument unless an update of the kind `other` finds its arrays where this
  // layout has them.
  void check(const UpdateKind& other, bool has_param_in_file, bool has_grad_in_file) const {
    const bool fits = other.dtype == kind.dtype && other.states() == kind.states() &&
                      other.state_dtype == kind.state_dtype &&
                      (!has_param_in_file || other.param_bytes() == kind.param_bytes()) &&
                      (!has_grad_in_file || other.grad_dtype == kind.grad_dtype);
    if (!fits) throw std::invalid_argument("the kind of the update does not fit the tiles");
  }

  UpdateKind kind;
  std::size_t tile_numel;
  bool param_in_file;  // buffers have room for parameters
  bool grad_in_file;
};

// Where one part of a tile lives: in RAM, or at an offset of the pipeline's file.
struct Location {
  char* address = nullptr;
  std::int64_t file_offset = -1;

  bool in_file() const { return address == nullptr; }
};

// Elements [first, first + numel) of a tile are updated with the task's hyper-parameters `hyper`.
// With states in 8 bits `first` is a multiple of kStateBlockNumel, and a segment that ends inside a
// state block ends with its parameter: nothing else is in that block.
struct StepSegment {
  std::size_t first = 0;
  std::size_t numel = 0;
  std::size_t hyper = 0;
  std::uint64_t index = 0;  // number of element `first`, for the random bits of states
};

// The update of one tile. `key` names the tile (at least 0); `priority` orders the first uses of
// tiles after their updates. Tasks are taken in the order of `priority`; those with the same, or of
// one tile, in the order in which they were submitted.
//
// A task *leaves* what it reads in the file as it is if it has other places to write to: for the
// optimizer state `optim_state_to`, for parameters in the file `param_to`. Parameters in RAM it
// changes in place; if the task has a `saved_param`, after it has written their old bits to there,
// so that the update can be taken back.
struct StepTask {
  static constexpr std::int64_t kNone = -1;

  std::int64_t key = 0;
  std::uint32_t priority = 0;
  Location param, grad, optim_state;
  std::vector<StepSegment> segments;
  std::int64_t optim_state_to = kNone;  // file offsets, as the next two
  std::int64_t param_to = kNone;
  std::int64_t saved_param = kNone;

  bool needs_buffer() const { return param.in_file() || grad.in_file() || optim_state.in_file(); }

  // Throws std::invalid_argument, with the key and the fact, unless the task fits the layout and a
  // table of `hypers` hyper-parameters. Without `has_file` all its parts must be in RAM.
  void check(const TileLayout& layout, std::size_t hypers, bool has_file) const;
};

// What a task to come is expected to find in the file, if anything. The fields are the task's.
struct Expectation {
  std::int64_t key = 0;
  std::uint32_t priority = 0;
  Location param, optim_state;

  bool in_file() const { return param.in_file() || optim_state.in_file(); }

  // Throws std::invalid_argument as StepTask::check() does.
  void check(const TileLayout& layout, bool has_file) const;
};

}  // namespace hetero
