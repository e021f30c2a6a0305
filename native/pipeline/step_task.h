// What the step pipeline works on: tiles, where their parts live, and the update of one of them.
//
// A *tile* is the part of a rank's shard in one slot: parameters, gradients and the optimizer
// state, which includes what makes the parameters fp32 masters. Each of the three is either in RAM,
// where it is used in place, or in the file, from where it passes through a *buffer*. tile_layout.h
// says how both are laid out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "update/tile_layout.h"

namespace hetero {

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
// so that the update can be taken back. A task that leaves nothing and has a `saved_param` is made
// once more: it first reads these bits back.
struct StepTask {
  static constexpr std::int64_t kNone = -1;

  std::int64_t key = 0;
  std::uint32_t priority = 0;
  Location param, grad, optim_state;
  std::vector<StepSegment> segments;
  std::int64_t optim_state_to = kNone;  // file offsets, as the next two
  std::int64_t param_to = kNone;
  std::int64_t saved_param = kNone;

  bool leaves() const { return optim_state_to != kNone || param_to != kNone; }

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
