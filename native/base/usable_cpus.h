// How many CPUs this process may keep busy: its affinity mask, and the quotas of its control
// groups.
#pragma once

#include <optional>
#include <string>

namespace hetero {

// The CPU time, in CPUs, that the quotas of the process's control groups (version 1 and 2) and of
// all above them allow; none if there is no quota. `root` is put before /proc and /sys.
std::optional<double> cpu_quota(const std::string& root = "");

// The CPUs that the process may run on, and no more than its quota pays for, rounded down: threads
// that work together and share a quota that is too small are stopped by turns, and wait for each
// other. At least 1.
unsigned usable_cpus();

}  // namespace hetero
