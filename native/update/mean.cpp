#include "update/mean.h"

#include "base/parallel_blocks.h"
#include "update/isa/isa.h"

namespace hetero {

void mean(Dtype dtype, const std::vector<const char*>& sources, char* target, std::size_t numel) {
  const Kernels::Mean kernel = kernels().mean[static_cast<std::size_t>(dtype)];
  for_blocks(numel, [&](std::size_t first, std::size_t n) {
    kernel(sources.data(), sources.size(), first, n, target);
  });
}

}  // namespace hetero
