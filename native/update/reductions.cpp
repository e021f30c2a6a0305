#include "update/reductions.h"

#include <algorithm>
#include <numeric>

#include "base/worker_pool.h"
#include "update/isa/isa.h"
#include "update/update.h"

namespace hetero {

namespace {

// The sum of `sum(first, numel)` over the blocks of an array, which the pool computes.
template <class Sum>
double over_blocks(std::size_t numel, Sum sum) {
  std::vector<double> sums((numel + kSumNumel - 1) / kSumNumel);
  WorkerPool::instance().run(sums.size(), [&](std::size_t i) {
    const std::size_t first = i * kSumNumel;
    sums[i] = sum(first, std::min(kSumNumel, numel - first));
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);  // in order
}

// By a kernel for the target's dtype and the source's.
double write_and_sum(const Kernels::SummedWrite (&table)[kDtypes][kDtypes], Dtype source_dtype,
                     const char* source, Dtype dtype, char* target, std::size_t numel) {
  const Kernels::SummedWrite kernel =
      table[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(source_dtype)];
  return over_blocks(numel, [=](std::size_t first, std::size_t n) {
    return kernel(source + first * element_bytes(source_dtype),
                  target + first * element_bytes(dtype), n);
  });
}

}  // namespace

double sum_of_squares(Dtype dtype, const char* values, std::size_t numel) {
  const Kernels::SumOfSquares kernel = kernels().sum_of_squares[static_cast<std::size_t>(dtype)];
  return over_blocks(numel, [=](std::size_t first, std::size_t n) {
    return kernel(values + first * element_bytes(dtype), n);
  });
}

double copy_and_sum(Dtype source_dtype, const char* source, Dtype dtype, char* target,
                    std::size_t numel) {
  return write_and_sum(kernels().copy_and_sum, source_dtype, source, dtype, target, numel);
}

double add_and_sum(Dtype source_dtype, const char* source, Dtype dtype, char* target,
                   std::size_t numel) {
  return write_and_sum(kernels().add_and_sum, source_dtype, source, dtype, target, numel);
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
