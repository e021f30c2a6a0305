#include "io/fault_plan.h"

#include <algorithm>
#include <stdexcept>

namespace hetero {

void FaultPlan::add(const Fault& fault) {
  if (fault.error < 0 || (fault.error == 0 && fault.short_bytes < 0 && !fault.throws)) {
    throw std::invalid_argument("a fault needs a positive errno, a number of bytes or throws");
  }
  if (fault.count == 0) throw std::invalid_argument("a fault needs a count of at least 1");
  faults_.push_back(fault);
}

std::int64_t FaultPlan::apply(IoKind kind, std::int64_t result) {
  if (faults_.empty()) return result;
  bool throws = false;
  for (Fault& fault : faults_) {
    if (fault.kind != kind) continue;
    if (fault.nth > 0) {
      --fault.nth;
      continue;
    }
    --fault.count;
    throws |= fault.throws;
    if (fault.error != 0) {
      result = -fault.error;
    } else if (fault.short_bytes >= 0) {
      result = std::min(result, fault.short_bytes);
    }
  }
  std::erase_if(faults_, [](const Fault& fault) { return fault.count == 0; });
  if (throws) throw std::runtime_error("an injected fault");
  return result;
}

}  // namespace hetero
