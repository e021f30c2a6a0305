// The size of the pages that arenas ask for and that registered buffers are cut at.
#pragma once

#include <cstddef>

namespace hetero {

inline constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

}  // namespace hetero
