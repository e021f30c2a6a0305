// Where the parts of a tile are.
//
// An optimizer state is laid out as [master | state 0 | state 1], and fills whole pages; a buffer
// as [optimizer state | param | grad]. Every part is as long as a whole tile.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "update/update_kind.h"

namespace hetero {

// What all tiles of a pipeline have in common, and where the parts of a buffer are, in bytes.
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

  // The arrays in a buffer, offset and bytes of each: the master's part that is not the parameter,
  // the states, and parameters and gradients if they are in the file.
  std::vector<std::pair<std::size_t, std::size_t>> buffer_arrays() const {
    std::vector<std::pair<std::size_t, std::size_t>> arrays;
    const auto add = [&](std::size_t begin, std::size_t end) {
      if (begin < end) arrays.emplace_back(begin, end - begin);
    };
    add(0, state_at(0));
    for (std::size_t i = 0; i < kind.states(); ++i) add(state_at(i), state_at(i + 1));
    add(param_at(), grad_at());
    add(grad_at(), buffer_bytes());
    return arrays;
  }

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

}  // namespace hetero
