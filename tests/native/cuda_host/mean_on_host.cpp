// native/update/cuda/mean.cu as C++: every thread of a launch, one after another.
#include "update/cuda/mean.cu"

#include <string>

// As cuLaunchKernel: `arguments` point to the kernel's parameters.
extern "C" int hetero_on_host(const char* kernel, unsigned blocks, void** arguments) {
  using namespace hetero::cuda;
  if (kernel != std::string("hetero_mean")) return 1;
  const auto& parts = *static_cast<const Parts*>(arguments[0]);
  for (unsigned block = 0; block < blocks; ++block) {
    for (unsigned thread = 0; thread < kThreads; ++thread) mean_thread(parts, block, thread);
  }
  return 0;
}
