// NUMA nodes: groups of CPUs, each with memory that is nearer to them than the other nodes' is.
//
// The worker pool divides its jobs among the nodes, and arenas lay the arrays of tiles on them in
// the same proportion, so that a block's memory is on the node of the thread that computes it.
// Nodes are numbered from 0 without gaps here, whatever the kernel's numbers are.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace hetero {

class NumaNodes {
 public:
  // The CPUs of each node. One node, or none, stands for a machine that is not divided: then
  // nothing here makes a system call. Throws std::invalid_argument for a node without CPUs, and for
  // numbers that no CPU can have.
  explicit NumaNodes(const std::vector<std::vector<int>>& cpus);

  std::size_t count() const { return masks_.size(); }  // at least 1

  // The node of the CPU that the calling thread is on now; 0 if that belongs to no node.
  std::size_t here() const { return count() == 1 ? 0 : node_of(sched_getcpu()); }

  // The node that has one of the CPUs; nothing if none has, or there is one node.
  std::optional<std::size_t> node_with(const std::vector<int>& cpus) const;

  // The node of thread `i` of `threads` that are shared out in proportion to the nodes' CPUs.
  std::size_t node_of_thread(std::size_t i, std::size_t threads) const;

  // Lets the thread run on the node's CPUs alone; with one node, or if the kernel refuses, it runs
  // where it could before.
  void bind(pthread_t thread, std::size_t node) const;

 private:
  friend class OnNode;

  std::size_t node_of(int cpu) const;

  std::vector<cpu_set_t> masks_;       // by node
  std::vector<std::size_t> of_cpu_;    // the node of each CPU; count() for CPUs of no node
  std::vector<std::size_t> cpus_end_;  // how many CPUs a node and those before it have
};

// While it lives, the thread that made it runs on the node's CPUs alone, so that pages which it
// touches first lie on that node, if there is room. If the kernel refuses, the thread runs on where
// it is. (A memory policy would do the same without moving the thread, but containers may set none:
// Docker's default filter of system calls refuses set_mempolicy().)
class OnNode {
 public:
  OnNode(const NumaNodes& nodes, std::size_t node);
  OnNode(const OnNode&) = delete;
  OnNode& operator=(const OnNode&) = delete;
  ~OnNode();

 private:
  std::optional<cpu_set_t> before_;  // where the thread could run, if that was changed
};

// Of the nodes that have memory which this process may use, those CPUs which are among `cpus`;
// nodes without any are left out. None if that is not known, or if one of `cpus` is on no such
// node: then the nodes do not say where memory is near. `root` is put before /proc and /sys.
std::vector<std::vector<int>> usable_nodes(const std::vector<int>& cpus,
                                           const std::string& root = "");

// The CPUs of the kernel's node that a PCI device ("0000:3B:00.0") is attached to; none if that is
// not known. `root` as above.
std::vector<int> cpus_near(const std::string& pci_device, const std::string& root = "");

// Whether the calling thread, and so the process that started it, was given a memory policy.
bool has_memory_policy();

// The nodes of this process, found at the first call from the CPUs that the caller may run on. One
// node if the caller has a memory policy (numactl's, say): whoever has set it has decided where
// memory lies.
const NumaNodes& numa_nodes();

// For tests: the nodes from now on; none: as found. No worker of the pool may live. What callers
// have of the nodes before stays valid.
void set_numa_nodes(const std::vector<std::vector<int>>& cpus);

}  // namespace hetero
