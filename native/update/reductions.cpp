#include "update/reductions.h"

#include <algorithm>

#include "base/worker_pool.h"
#include "update/isa/isa.h"
#include "update/update.h"

namespace hetero {

double sum_of_squares(Dtype dtype, const char* values, std::size_t numel) {
  const Kernels::SumOfSquares kernel = kernels().sum_of_squares[static_cast<std::size_t>(dtype)];
  std::vector<double> sums((numel + kSumNumel - 1) / kSumNumel);
  WorkerPool::instance().run(sums.size(), [&](std::size_t i) {
    const std::size_t first = i * kSumNumel;
    sums[i] = kernel(values + first * element_bytes(dtype), std::min(kSumNumel, numel - first));
  });
  double total = 0.0;
  for (const double sum : sums) total += sum;
  return total;
}

void mean(Dtype dtype, const std::vector<const char*>& sources, char* target, std::size_t numel) {
  const Kernels::Mean kernel = kernels().mean[static_cast<std::size_t>(dtype)];
  for_blocks(numel, [&](std::size_t first, std::size_t n) {
    kernel(sources.data(), sources.size(), first, n, target);
  });
}

void stream(char* p, const char* g, char* m, char* v, std::size_t numel) {
  const Kernels::Stream kernel = kernels().stream;
  const UpdateArrays at = {p, g, nullptr, {m, v}};
  constexpr UpdateKind like{};  // fp32 Adam
  for_blocks(numel, [&](std::size_t i, std::size_t n) { kernel(advanced(at, like, i), n); });
}

}  // namespace hetero
