// Where the parts of a piece are.
//
// A record is laid out as [master | state 0 | state 1], a buffer as [record | param | grad]; every
// part is as long as a whole piece.
#pragma once

#include <cstddef>

#include "update/update_kind.h"

namespace hetero {

// What all pieces of a pipeline have in common, and where the parts of a buffer are, in bytes.
struct PieceLayout {
  // Throws std::invalid_argument unless piece_numel is a positive multiple of 2048, which makes
  // every part a multiple of a page and so fit for direct I/O.
  PieceLayout(const UpdateKind& kind, std::size_t piece_numel, bool param_in_file,
              bool grad_in_file);

  std::size_t state_bytes() const { return piece_numel * element_bytes(kind.state_dtype); }
  std::size_t state_at(std::size_t i) const {
    return piece_numel * master_bytes(kind.dtype) + i * state_bytes();
  }
  std::size_t record_bytes() const { return state_at(kind.states()); }
  std::size_t param_bytes() const { return piece_numel * element_bytes(kind.dtype); }
  std::size_t grad_bytes() const { return piece_numel * element_bytes(kind.grad_dtype); }
  std::size_t param_at() const { return record_bytes(); }
  std::size_t grad_at() const { return param_at() + (param_in_file ? param_bytes() : 0); }
  std::size_t buffer_bytes() const { return grad_at() + (grad_in_file ? grad_bytes() : 0); }

  UpdateKind kind;
  std::size_t piece_numel;
  bool param_in_file;  // buffers have room for a parameter payload
  bool grad_in_file;
};

}  // namespace hetero
