#include "base/numa_nodes.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <deque>
#include <stdexcept>
#include <utility>

#include "base/text_file.h"
#include "base/thread_annotations.h"

namespace hetero {
namespace {

// The numbers in a list of ranges as the kernel writes it, "0-3,8"; none if it is something else,
// or the file is not there.
std::vector<int> parse_list(std::string_view text) {
  std::vector<int> found;
  for (const std::string_view range : split(text, ',')) {
    const std::size_t dash = range.find('-');
    const auto first = whole_number(range.substr(0, dash));
    const auto last = dash == std::string_view::npos ? first : whole_number(range.substr(dash + 1));
    if (!first || !last || *first < 0 || *last < *first || *last >= CPU_SETSIZE) return {};
    for (auto each = *first; each <= *last; ++each) found.push_back(static_cast<int>(each));
  }
  return found;
}

std::vector<int> read_list(const std::string& path) { return parse_list(trim(read_text(path))); }

std::vector<int> cpus_of_node(int node, const std::string& root) {
  return read_list(root + "/sys/devices/system/node/node" + std::to_string(node) + "/cpulist");
}

bool has(const std::vector<int>& numbers, int number) {
  return std::find(numbers.begin(), numbers.end(), number) != numbers.end();
}

// The nodes, by the kernel's numbers and in their order, that have memory the process may use.
std::vector<int> nodes_with_memory(const std::string& root) {
  std::vector<int> allowed;
  constexpr std::string_view kName = "Mems_allowed_list:";
  const std::string status = read_text(root + "/proc/self/status");
  for (const std::string_view line : split(status, '\n')) {
    if (line.starts_with(kName)) allowed = parse_list(trim(line.substr(kName.size())));
  }
  // (Without control groups for memory all numbers that a kernel could have are allowed.)
  const std::vector<int> existing = read_list(root + "/sys/devices/system/node/has_memory");
  std::erase_if(allowed, [&](int node) { return !has(existing, node); });
  return allowed;
}

std::vector<int> own_cpus() {
  std::vector<int> cpus;
  cpu_set_t mask;
  // It fails if there are more CPUs than cpu_set_t has bits; then nothing is known of nodes.
  if (sched_getaffinity(0, sizeof mask, &mask) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(static_cast<std::size_t>(cpu), &mask)) cpus.push_back(cpu);
  }
  return cpus;
}

std::vector<std::vector<int>> own_nodes() {
  if (has_memory_policy()) return {};
  return usable_nodes(own_cpus());
}

// All that numa_nodes() has ever returned: other threads may be using any of them.
class KnownNodes {
 public:
  explicit KnownNodes(const std::vector<std::vector<int>>& cpus) { set(cpus); }

  const NumaNodes& current() const { return *current_.load(std::memory_order_acquire); }

  void set(const std::vector<std::vector<int>>& cpus) EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    current_.store(&all_.emplace_back(cpus), std::memory_order_release);
  }

 private:
  Mutex mutex_;
  std::deque<NumaNodes> all_ GUARDED_BY(mutex_);
  std::atomic<const NumaNodes*> current_{nullptr};
};

KnownNodes& known_nodes() {
  static auto* const known = new KnownNodes(own_nodes());  // never destroyed, as the pool
  return *known;
}

}  // namespace

NumaNodes::NumaNodes(const std::vector<std::vector<int>>& cpus)
    : masks_(std::max(cpus.size(), std::size_t{1})) {
  std::size_t before = 0;
  for (std::size_t node = 0; node < cpus.size(); ++node) {
    CPU_ZERO(&masks_[node]);
    if (cpus[node].empty()) throw std::invalid_argument("a NUMA node without CPUs");
    for (const int cpu : cpus[node]) {
      if (cpu < 0 || cpu >= CPU_SETSIZE) {
        throw std::invalid_argument("a NUMA node has no CPU " + std::to_string(cpu));
      }
      const auto number = static_cast<std::size_t>(cpu);
      CPU_SET(number, &masks_[node]);
      if (number >= of_cpu_.size()) of_cpu_.resize(number + 1, count());
      of_cpu_[number] = node;
    }
    cpus_end_.push_back(before += cpus[node].size());
  }
}

std::size_t NumaNodes::node_of(int cpu) const {
  const auto number = static_cast<std::size_t>(cpu);  // -1, of a failure, is past all
  const std::size_t node = number < of_cpu_.size() ? of_cpu_[number] : count();
  return node < count() ? node : 0;
}

std::optional<std::size_t> NumaNodes::node_with(const std::vector<int>& cpus) const {
  if (count() == 1) return std::nullopt;
  for (const int cpu : cpus) {
    const auto number = static_cast<std::size_t>(cpu);
    if (number < of_cpu_.size() && of_cpu_[number] < count()) return of_cpu_[number];
  }
  return std::nullopt;
}

std::size_t NumaNodes::node_of_thread(std::size_t i, std::size_t threads) const {
  if (count() == 1) return 0;
  // Of all CPUs, one after another, the one as far from the first as the thread from the first.
  const std::size_t cpu = i * cpus_end_.back() / threads;
  const auto end = std::upper_bound(cpus_end_.begin(), cpus_end_.end(), cpu);
  return static_cast<std::size_t>(end - cpus_end_.begin());
}

void NumaNodes::bind(pthread_t thread, std::size_t node) const {
  if (count() > 1) pthread_setaffinity_np(thread, sizeof masks_[node], &masks_[node]);
}

OnNode::OnNode(const NumaNodes& nodes, std::size_t node) {
  if (nodes.count() == 1) return;
  cpu_set_t own, shared;
  if (sched_getaffinity(0, sizeof own, &own) != 0) return;  // it could not be undone
  CPU_AND(&shared, &own, &nodes.masks_[node]);
  if (CPU_EQUAL(&shared, &own)) return;  // it is there already, as the node's workers are
  nodes.bind(pthread_self(), node);
  before_ = own;
}

OnNode::~OnNode() {
  if (before_) pthread_setaffinity_np(pthread_self(), sizeof *before_, &*before_);
}

std::vector<std::vector<int>> usable_nodes(const std::vector<int>& cpus, const std::string& root) {
  std::vector<std::vector<int>> found;
  std::size_t known = 0;
  for (const int node : nodes_with_memory(root)) {
    std::vector<int> of_node = cpus_of_node(node, root);
    std::erase_if(of_node, [&](int cpu) { return !has(cpus, cpu); });
    known += of_node.size();
    if (!of_node.empty()) found.push_back(std::move(of_node));
  }
  if (known != cpus.size()) found.clear();
  return found;
}

std::vector<int> cpus_near(const std::string& pci_device, const std::string& root) {
  std::string name = pci_device;
  // As the kernel writes hexadecimal digits.
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  const auto node = whole_number(read_text(root + "/sys/bus/pci/devices/" + name + "/numa_node"));
  if (!node || *node < 0) return {};  // -1 where the firmware does not say
  return cpus_of_node(static_cast<int>(*node), root);
}

bool has_memory_policy() {
  constexpr int kDefault = 0;  // MPOL_DEFAULT, of a header that not every system has
  int mode = kDefault;
  // Where a process may not even ask, nobody could have set one.
  return ::syscall(SYS_get_mempolicy, &mode, nullptr, 0, nullptr, 0) == 0 && mode != kDefault;
}

const NumaNodes& numa_nodes() { return known_nodes().current(); }

void set_numa_nodes(const std::vector<std::vector<int>>& cpus) {
  known_nodes().set(cpus.empty() ? own_nodes() : cpus);
}

}  // namespace hetero
