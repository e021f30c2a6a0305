#include "update/sum_of_squares.h"

#include <algorithm>
#include <vector>

#include "base/worker_pool.h"
#include "update/isa/isa.h"

namespace hetero {
namespace {

constexpr std::size_t kBlockNumel = 32 * 1024;  // part of the result's definition

}  // namespace

double sum_of_squares(Dtype dtype, const char* values, std::size_t numel) {
  const Kernels::SumOfSquares kernel = kernels().sum_of_squares[static_cast<std::size_t>(dtype)];
  std::vector<double> sums((numel + kBlockNumel - 1) / kBlockNumel);
  WorkerPool::instance().run(sums.size(), [&](std::size_t i) {
    const std::size_t first = i * kBlockNumel;
    sums[i] = kernel(values + first * element_bytes(dtype), std::min(kBlockNumel, numel - first));
  });
  double total = 0.0;
  for (const double sum : sums) total += sum;
  return total;
}

}  // namespace hetero
