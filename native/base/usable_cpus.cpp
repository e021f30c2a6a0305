#include "base/usable_cpus.h"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <string_view>
#include <thread>
#include <vector>

namespace hetero {
namespace {

// The whole content; empty if the file cannot be read. Without streams: a program may bring a
// second copy of the C++ library, linked statically or of another compiler, and a stream whose
// facets are the one's and whose identifiers are the other's crashes (seen with the compiler of a
// machine with a GPU).
std::string read_text(const std::string& path) {
  std::string text;
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return text;
  char part[4096];
  for (ssize_t got; (got = ::read(fd, part, sizeof part)) > 0;) {
    text.append(part, static_cast<std::size_t>(got));
  }
  ::close(fd);
  return text;
}

// The parts between separators. A text that ends with the separator has no empty part there.
std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const std::size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) break;
    text.remove_prefix(end + 1);
  }
  return parts;
}

// The whole number that `text` is, but for a newline; none if it is something else.
std::optional<long long> whole_number(std::string_view text) {
  if (text.ends_with('\n')) text.remove_suffix(1);
  long long number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

// quota / period of one group; none if it has no quota, or no such files. Version 2 has both in
// one file, "max" for no quota; version 1 has two files, and -1 for no quota.
std::optional<double> quota_of(const std::string& folder) {
  const std::string both = read_text(folder + "/cpu.max");
  const auto parts = split(both, ' ');
  auto quota = parts.size() == 2 ? whole_number(parts[0]) : std::nullopt;
  auto period = parts.size() == 2 ? whole_number(parts[1]) : std::nullopt;
  if (!period) {
    quota = whole_number(read_text(folder + "/cpu.cfs_quota_us"));
    period = whole_number(read_text(folder + "/cpu.cfs_period_us"));
  }
  if (!quota || !period || *quota <= 0 || *period <= 0) return std::nullopt;
  return static_cast<double>(*quota) / static_cast<double>(*period);
}

}  // namespace

std::optional<double> cpu_quota(const std::string& root) {
  const std::string mount = root + "/sys/fs/cgroup";
  std::optional<double> least;
  // Each line is hierarchy:controllers:path; version 2 is hierarchy 0 and names no controllers.
  const std::string groups = read_text(root + "/proc/self/cgroup");
  for (const std::string_view line : split(groups, '\n')) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == line.npos ? line.npos : line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string controllers(line.substr(first + 1, second - first - 1));
    const std::string path(line.substr(second + 1));
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
