#include "update/isa/isa.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "update/isa/vec_scalar.h"
#include "update/kernels/make_kernels.inl.h"

namespace hetero {

constinit const Kernels scalar_kernels = make_kernels<VecScalar>();

namespace {

struct Isa {
  const char* name;
  bool (*runs_here)();
  const Kernels* kernels;
};

#if defined(__x86_64__)
// __builtin_cpu_supports also asks the operating system whether it saves the wide registers.
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
#endif

bool always() { return true; }

constexpr Isa kIsas[] = {
#if defined(__x86_64__)
    {"avx512", has_avx512, &avx512_kernels},
    {"avx2", has_avx2, &avx2_kernels},
#elif defined(__aarch64__)
    {"neon", always, &neon_kernels},
#endif
    {"scalar", always, &scalar_kernels},
};

// Relaxed throughout: it points to constants, which need no publication.
std::atomic<const Isa*> current{nullptr};

const Isa& find(const std::string& name, const char* asked_by) {
  std::string available;
  for (const Isa& candidate : kIsas) {
    if (!candidate.runs_here()) continue;
    if (name == candidate.name) return candidate;
    available += available.empty() ? "" : ", ";
    available += candidate.name;
  }
  throw std::invalid_argument(std::string(asked_by) + ": instruction set '" + name +
                              "' is not available; this machine has " + available);
}

const Isa& choose() {
  // NOLINTNEXTLINE(concurrency-mt-unsafe): nothing here changes the environment
  if (const char* wanted = std::getenv("HETERO_ISA"); wanted != nullptr && *wanted != '\0') {
    return find(wanted, "HETERO_ISA");
  }
  return *std::ranges::find_if(kIsas, [](const Isa& each) { return each.runs_here(); });
}

const Isa& in_use() {
  const Isa* chosen = current.load(std::memory_order_relaxed);
  if (chosen == nullptr) {
    const Isa* first = &choose();
    // If another thread has called set_isa() meanwhile, its choice stands.
    if (current.compare_exchange_strong(chosen, first, std::memory_order_relaxed)) chosen = first;
  }
  return *chosen;
}

}  // namespace

std::vector<std::string> isa_available() {
  std::vector<std::string> names;
  for (const Isa& candidate : kIsas) {
    if (candidate.runs_here()) names.emplace_back(candidate.name);
  }
  return names;
}

std::string isa() { return in_use().name; }

void set_isa(const std::string& name) {
  current.store(&find(name, "set_isa"), std::memory_order_relaxed);
}

const Kernels& kernels() { return *in_use().kernels; }

}  // namespace hetero
