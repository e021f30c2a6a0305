#include "base/usable_cpus.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <thread>

namespace hetero {
namespace {

// quota / period of one group; none if it has no quota, or no such files. Version 2 has both in
// one file, "max" for no quota; version 1 has two files, and -1 for no quota.
std::optional<double> quota_of(const std::string& folder) {
  double quota = -1, period = 0;
  std::ifstream(folder + "/cpu.max") >> quota >> period;
  if (period <= 0) {
    std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
    std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  }
  if (quota <= 0 || period <= 0) return std::nullopt;
  return quota / period;
}

}  // namespace

std::optional<double> cpu_quota(const std::string& root) {
  const std::string mount = root + "/sys/fs/cgroup";
  std::optional<double> least;
  std::ifstream groups(root + "/proc/self/cgroup");
  // Each line is hierarchy:controllers:path; version 2 is hierarchy 0 and names no controllers.
  std::string hierarchy, controllers, path;
  while (std::getline(groups, hierarchy, ':') && std::getline(groups, controllers, ':') &&
         std::getline(groups, path)) {
    std::string hierarchy_at = mount;
    if (!controllers.empty()) {
      if (("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
      hierarchy_at += "/" + controllers;
    }
    // In a container the path may be the host's; its own group is then the root of the mount.
    for (std::size_t end = path.size(); end != std::string::npos; end = path.rfind('/', end - 1)) {
      const std::optional<double> quota = quota_of(hierarchy_at + path.substr(0, end));
      if (quota) least = std::min(*quota, least.value_or(*quota));
      if (end == 0) break;
    }
  }
  return least;
}

unsigned usable_cpus() {
  cpu_set_t mask;
  // It fails if there are more CPUs than cpu_set_t has bits.
  const bool known = sched_getaffinity(0, sizeof mask, &mask) == 0;
  double cpus = known ? CPU_COUNT(&mask) : std::thread::hardware_concurrency();
  if (const auto quota = cpu_quota()) cpus = std::min(cpus, *quota);
  return static_cast<unsigned>(std::max(1.0, cpus));
}

}  // namespace hetero
