// native/update/cuda/update.cu as C++: every thread of a launch, one after another.
// Under a name of its own, so that tests can launch any kind.
#include "update/cuda/update.cu"

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace hetero::cuda {
namespace {

template <class Do>
void threads(unsigned blocks, Do run) {
  for (unsigned block = 0; block < blocks; ++block) {
    for (unsigned thread = 0; thread < kThreads; ++thread) run(block, thread);
  }
}

struct Launches {
  void (*update)(void** arguments, unsigned blocks);
  void (*lanes)(void** arguments, unsigned blocks);
};

template <class T>
T& argument(void** arguments, int i) {
  return *static_cast<T*>(arguments[i]);
}

// What half a warp does: all its threads update, and then all make codes.
template <UpdateKind kind>
void update_codes(const UpdateBatch& batch, unsigned block, unsigned first_thread) {
  std::vector<CodesUpdate<kind>> half_warp;
  for (unsigned thread = first_thread; thread < first_thread + kBlockThreads; ++thread) {
    half_warp.emplace_back(batch, block, thread);
  }
  if (half_warp[0].is_outside()) return;
  for (auto& thread : half_warp) thread.update();
  if constexpr (kind.moves_states()) {
    Largest largest[2];
    for (const auto& thread : half_warp) largest[0].join(thread.template largest<0>());
    if constexpr (kind.states() == 2) {
      for (const auto& thread : half_warp) largest[1].join(thread.template largest<1>());
    }
    for (const auto& thread : half_warp) {
      thread.template encode<0>(largest[0]);
      if constexpr (kind.states() == 2) thread.template encode<1>(largest[1]);
    }
  }
}

template <UpdateKind kind>
constexpr Launches launches_of() {
  return {
      [](void** a, unsigned blocks) {
        const auto& batch = argument<UpdateBatch>(a, 0);
        threads(blocks, [&](unsigned block, unsigned thread) {
          if constexpr (kind.state_dtype != StateDtype::eight_bit) {
            update_group<kind>(batch, block, thread);
          } else if (thread % kBlockThreads == 0) {
            update_codes<kind>(batch, block, thread);
          }
        });
      },
      [](void** a, unsigned blocks) {
        threads(blocks, [&](unsigned block, unsigned thread) {
          lanes_thread<kind.grad_dtype>(argument<SumBatch>(a, 0), block, thread);
        });
      },
  };
}

template <std::size_t... numbers>
const Launches& launches(std::size_t number, std::index_sequence<numbers...>) {
  static constexpr Launches table[] = {launches_of<kind_of(numbers)>()...};
  return table[number];
}

}  // namespace
}  // namespace hetero::cuda

// As cuLaunchKernel: `arguments` point to the kernel's parameters.
extern "C" int hetero_on_host(unsigned kind, const char* kernel, unsigned blocks,
                              void** arguments) {
  using namespace hetero::cuda;
  const Launches& of = launches(kind, std::make_index_sequence<hetero::kUpdateKinds>());
  const std::string name = kernel;
  if (name == "hetero_update") {
    of.update(arguments, blocks);
  } else if (name == "hetero_lanes") {
    of.lanes(arguments, blocks);
  } else if (name == "hetero_tree") {
    threads(blocks, [&](unsigned block, unsigned thread) {
      tree_thread(argument<double*>(arguments, 0), argument<std::uint64_t>(arguments, 1), block,
                  thread);
    });
  } else if (name == "hetero_total") {
    threads(blocks, [&](unsigned block, unsigned thread) {
      total_thread(argument<SumBatch>(arguments, 0), argument<double*>(arguments, 1), block,
                   thread);
    });
  } else {
    return 1;
  }
  return 0;
}
