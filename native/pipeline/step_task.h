// What the step pipeline works on: pieces, where their parts live, and the update of one of them.
//
// A *piece* is a rank's part of a chunk: a parameter payload, a gradient payload and a record. Each
// of the three is either in RAM, where it is used in place, or in the file, from where it passes
// through a *buffer*. piece_layout.h says how both are laid out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "update/state_layout.h"

namespace hetero {

// Where a payload lives: in RAM, or at an offset of the pipeline's file.
struct Location {
  char* address = nullptr;
  std::int64_t file_offset = -1;

  bool in_file() const { return address == nullptr; }
};

// Elements [first, first + numel) of a piece are updated with the task's hyper-parameters `hyper`.
struct StepSegment {
  std::size_t first = 0;
  std::size_t numel = 0;
  std::size_t hyper = 0;
  std::uint64_t index = 0;  // number of element `first`, for the random bits of bf16 states
};

// The update of one piece. `key` names the piece (at least 0). Tasks are taken in the order of
// `due`; those with the same, or of one piece, in the order in which they were submitted.
struct StepTask {
  std::int64_t key = 0;
  std::uint32_t due = 0;
  Location param, grad, record;
  std::vector<StepSegment> segments;

  bool needs_buffer() const { return param.in_file() || grad.in_file() || record.in_file(); }

  // Throws std::invalid_argument, with the key and the fact, unless the task fits the layout and a
  // table of `hypers` hyper-parameters. Without `has_file` all its parts must be in RAM.
  void check(const PieceLayout& layout, std::size_t hypers, bool has_file) const;
};

// What a task to come is expected to find in the file, if anything. The key and the places are the
// task's.
struct Expectation {
  std::int64_t key = 0;
  std::uint32_t due = 0;  // as a task's
  Location param, record;

  bool in_file() const { return param.in_file() || record.in_file(); }

  // Throws std::invalid_argument likewise.
  void check(const PieceLayout& layout, bool has_file) const;
};

}  // namespace hetero
