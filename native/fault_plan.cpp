#include "fault_plan.h"

#include <algorithm>
#include <stdexcept>

namespace hetero {

void FaultPlan::add(IoKind kind, std::uint64_t nth, int error, std::int64_t short_bytes,
                    std::uint64_t count) {
  if (error < 0 || (error == 0 && short_bytes < 0)) {
    throw std::invalid_argument("a fault needs a positive errno or a number of bytes");
  }
  if (count == 0) throw std::invalid_argument("a fault needs a count of at least 1");
  faults_.push_back({kind, nth, error, short_bytes, count});
}

std::int64_t FaultPlan::apply(IoKind kind, std::int64_t result) {
  if (faults_.empty()) return result;
  for (Fault& fault : faults_) {
    if (fault.kind != kind) continue;
    if (fault.skip > 0) {
      --fault.skip;
      continue;
    }
    --fault.count;
    result = fault.error != 0 ? -fault.error : std::min(result, fault.short_bytes);
  }
  std::erase_if(faults_, [](const Fault& fault) { return fault.count == 0; });
  return result;
}

}  // namespace hetero
