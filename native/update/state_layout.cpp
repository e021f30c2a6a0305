#include "update/state_layout.h"

#include <stdexcept>
#include <string>

namespace hetero {
namespace {

constexpr std::size_t kPieceGranularity = 2048;  // elements; 2-byte parts are then whole pages

}  // namespace

PieceLayout::PieceLayout(const UpdateKind& kind, std::size_t piece_numel, bool param_in_file,
                         bool grad_in_file)
    : kind(kind),
      piece_numel(piece_numel),
      param_in_file(param_in_file),
      grad_in_file(grad_in_file) {
  if (piece_numel == 0 || piece_numel % kPieceGranularity != 0) {
    throw std::invalid_argument("piece_numel is " + std::to_string(piece_numel) +
                                ", must be a positive multiple of " +
                                std::to_string(kPieceGranularity));
  }
}

}  // namespace hetero
