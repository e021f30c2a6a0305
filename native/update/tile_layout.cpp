#include "update/tile_layout.h"

#include <stdexcept>
#include <string>

namespace hetero {
namespace {

constexpr std::size_t kTileGranularity = 2048;  // elements; 2-byte parts are then whole pages

}  // namespace

TileLayout::TileLayout(const UpdateKind& kind, std::size_t tile_numel, bool param_in_file,
                       bool grad_in_file)
    : kind(kind), tile_numel(tile_numel), param_in_file(param_in_file), grad_in_file(grad_in_file) {
  if (tile_numel == 0 || tile_numel % kTileGranularity != 0) {
    throw std::invalid_argument("tile_numel is " + std::to_string(tile_numel) +
                                ", must be a positive multiple of " +
                                std::to_string(kTileGranularity));
  }
}

}  // namespace hetero
