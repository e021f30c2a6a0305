// What the step pipeline works on: pieces, where their parts live, and the update of one of them.
//
// A *piece* is a rank's part of a chunk: a parameter payload, a gradient payload and a record. Each
// of the three is either in RAM, where it is used in place, or in the file, from where it passes
// through a *buffer*. A buffer is laid out as [record | param | grad]; a record as
// [master | exp_avg | exp_avg_sq], every part as long as a whole piece.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "adam.h"
#include "dtype.h"

namespace hetero {

// What all pieces of a pipeline have in common, and where the parts of a buffer are, in bytes.
struct PieceLayout {
  // Throws std::invalid_argument unless piece_numel is a positive multiple of 2048, which makes
  // every part a multiple of a page and so fit for direct I/O.
  PieceLayout(Dtype dtype, Dtype grad_dtype, std::size_t piece_numel, bool param_in_file,
              bool grad_in_file);

  std::size_t exp_avg_at() const { return piece_numel * master_bytes(dtype); }
  std::size_t exp_avg_sq_at() const { return exp_avg_at() + piece_numel * sizeof(float); }
  std::size_t record_bytes() const { return exp_avg_sq_at() + piece_numel * sizeof(float); }
  std::size_t param_bytes() const { return piece_numel * element_bytes(dtype); }
  std::size_t grad_bytes() const { return piece_numel * element_bytes(grad_dtype); }
  std::size_t param_at() const { return record_bytes(); }
  std::size_t grad_at() const { return param_at() + (param_in_file ? param_bytes() : 0); }
  std::size_t buffer_bytes() const { return grad_at() + (grad_in_file ? grad_bytes() : 0); }

  Dtype dtype;
  Dtype grad_dtype;
  std::size_t piece_numel;
  bool param_in_file;  // buffers have room for a parameter payload
  bool grad_in_file;
};

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
};

// The update of one piece. `key` names the piece (at least 0).
struct StepTask {
  std::int64_t key = 0;
  Location param, grad, record;
  std::vector<StepSegment> segments;

  bool needs_buffer() const { return param.in_file() || grad.in_file() || record.in_file(); }

  // Throws std::invalid_argument, with the key and the fact, unless the task fits the layout and a
  // table of `hypers` hyper-parameters. Without `has_file` all its parts must be in RAM.
  void check(const PieceLayout& layout, std::size_t hypers, bool has_file) const;
};

}  // namespace hetero
