// Faults to be injected into completions, for tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "io_engine.h"

namespace hetero {

// Each fault counts the completions of its kind on its own, from when it was added.
class FaultPlan {
 public:
  // The `nth` completion (from 0) and the count - 1 after it become -`error`, or with error 0 are
  // cut to `short_bytes`. Throws std::invalid_argument for a fault that does nothing.
  void add(IoKind kind, std::uint64_t nth, int error, std::int64_t short_bytes,
           std::uint64_t count);
  // What the completion's result becomes.
  std::int64_t apply(IoKind kind, std::int64_t result);

 private:
  struct Fault {
    IoKind kind;
    std::uint64_t skip;
    int error;
    std::int64_t short_bytes;
    std::uint64_t count;
  };

  std::vector<Fault> faults_;
};

}  // namespace hetero
