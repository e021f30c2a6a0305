// The parts of an array that belong on the NUMA nodes: part k of as many equal ones on node k, as
// index i of the n that a job of the worker pool has belongs to node i * nodes / n.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace hetero {

struct NodePart {
  std::byte* begin = nullptr;
  std::byte* end = nullptr;
  std::size_t node = 0;
};

// Cuts an array, at multiples of huge pages, which each lie on one node. One that is too short for
// a huge page per node goes to the nodes by turns, huge page by huge page: so both memories are
// used, while nothing is near. In order, without gaps.
std::vector<NodePart> node_parts(std::byte* array, std::size_t nbytes, std::size_t nodes);

// Populates the pages that lie wholly inside the parts, each on the part's node if there is room,
// with the worker pool's threads. Pages that exist stay what they are, and where they are. If the
// kernel refuses anything, whoever touches a page first populates it.
void populate(std::span<const NodePart> parts);

}  // namespace hetero
