// NUMA nodes: which one is near to a device, and, as tests see and change them, the functions of
// `_native.numa`.
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "base/numa_nodes.h"
#include "base/worker_pool.h"
#include "bindings/python.h"
#include "memory/node_parts.h"

namespace hetero {
namespace {

using Part = std::tuple<std::uintptr_t, std::uintptr_t, std::size_t>;  // begin, end, node

std::vector<Part> bound_node_parts(std::uintptr_t address, std::size_t nbytes, std::size_t nodes) {
  std::vector<Part> found;
  for (const auto& [begin, end, node] :
       node_parts(reinterpret_cast<std::byte*>(address), nbytes, nodes)) {
    found.emplace_back(reinterpret_cast<std::uintptr_t>(begin),
                       reinterpret_cast<std::uintptr_t>(end), node);
  }
  return found;
}

std::optional<std::size_t> node_near(const std::string& pci_device, const std::string& root) {
  return numa_nodes().node_with(cpus_near(pci_device, root));
}

// Joins the workers before; no other thread may use the pool.
void set_nodes(const std::vector<std::vector<int>>& cpus) {
  WorkerPool::instance().shutdown();
  set_numa_nodes(cpus);
}

}  // namespace

void bind_numa(py::module_& module) {
  module.def("node_near", &node_near, "pci_device"_a, "root"_a = "");
  py::module_ numa = module.def_submodule("numa");
  numa.def("usable_nodes", &usable_nodes, "cpus"_a, "root"_a = "");
  numa.def("has_memory_policy", &has_memory_policy);
  numa.def("count", [] { return numa_nodes().count(); });
  numa.def("set_nodes", &set_nodes, "cpus"_a, ReleaseGil());
  numa.def("node_parts", &bound_node_parts, "address"_a, "nbytes"_a, "nodes"_a);
}

}  // namespace hetero
