// The parts of an array that belong on the NUMA nodes: part k of as many equal ones on node k, as
// index i of the n that a job of the worker pool has belongs to node i * nodes / n.
//
// By arithmetic, for two sockets of 370 GB/s each and 120 GB/s in each direction between them, an
// update in RAM draws at most 740 GB/s if pages lie on the node of the thread that computes, 480 if
// they lie on either node, and 370 if all lie where one thread touched them first. None of it was
// measured: no machine with two nodes has run this, and tests make nodes up.
//
// Parts end at huge pages, so one is off by half a MiB on average; the unused end of a tile has
// memory and no blocks, which moves blocks off their parts by as much. Page-locked memory lies
// wholly on the node that the GPU is attached to, also where updates divide it: parameters and
// gradients are 6 of the 26 bytes that AdamW in bf16 moves, so updates still draw 600 GB/s. Copies
// that compute uses, buckets, and gradients on their way lie where they are touched first.
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
