// Faults to be injected into completions, for tests.
#pragma once

#include <cstdint>
#include <vector>

#include "io/io_engine.h"

namespace hetero {

// Each fault counts the completions of its kind on its own, from when it was added.
class FaultPlan {
 public:
  // Throws std::invalid_argument for a fault that does nothing.
  void add(const Fault& fault);
  // What the completion's result becomes. Throws std::runtime_error if that is the fault.
  std::int64_t apply(IoKind kind, std::int64_t result);

 private:
  std::vector<Fault> faults_;  // `nth` counts down
};

}  // namespace hetero
