"""What the ranks' collectives take, in seconds, as latency and bytes over bandwidth.

The model is alpha-beta: a message takes a latency, whatever its size, and its bytes over a
bandwidth; links inside a node and between nodes have one of each. Its formulas are those of Thakur,
Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005 (ring
all-gather, pairwise all-to-all, recursive doubling), with rings laid node after node as NCCL lays
them (its own estimate is in src/graph/tuning.cc). What is left out: the launch of a kernel, the
sum of what a mean receives, congestion of switches, and that several collectives at once slow each
other down by more than the bandwidth that they share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from offload.profile.machine_profile import Profile

# All-reduces of a few numbers by which a step ends: which gradients there are, their norm, and that
# all ranks take the same step.
AGREEMENTS = 3


@dataclass(frozen=True)
class CollectiveCost:
    """What one collective takes on each rank; `bytes_sent` by each of them, to all others.

    Attributes:
        latency_s: in which the links are free for another collective.
        transfer_s: for which it has the slowest link that it uses, alone.
        bytes_sent: parts of a byte are those of paddings.
        crosses_nodes: that link is the one between nodes.
    """

    latency_s: float
    transfer_s: float
    bytes_sent: float
    crosses_nodes: bool

    @property
    def seconds(self) -> float:
        """From when the last rank has begun it, if the links are free."""
        return self.latency_s + self.transfer_s


@dataclass(frozen=True)
class Network:
    """The ranks of one group, and the links between them.

    Attributes:
        local_ranks: ranks of the group on each node.
        nodes: that the group has ranks on.
        rank_bytes_per_s: what a rank sends to others of its node.
        node_bytes_per_s: what a rank sends to other nodes while all ranks of its node do so: an
            adapter of its own, or its share of the node's.
        rank_latency_s, node_latency_s: of a message inside a node, and to another one.
        between_devices: collectives take bytes from the memory of one DEVICE to that of another
            (NCCL), so that only this rank's shards cross the link to RAM; else all is in RAM.
    """

    local_ranks: int
    nodes: int
    rank_bytes_per_s: float
    node_bytes_per_s: float
    rank_latency_s: float = 0.0
    node_latency_s: float = 0.0
    between_devices: bool = False

    @classmethod
    def of(cls, profile: Profile, local_ranks: int, nodes: int) -> Network | None:
        """That of all ranks, `local_ranks` on each of `nodes` machines.

        Args:
            profile: one rank's share of its machine. Latencies that it does not have are zero.
            local_ranks: ranks on each machine.
            nodes: machines.

        Returns None if the profile does not have the bandwidth that they need. Where the one
        between nodes is known and the one inside a node is not, the former is the slower one.
        """
        inside, between = profile.rank_bytes_per_s, profile.node_bytes_per_s
        if between is None if nodes > 1 else inside is None:
            return None
        return cls(
            local_ranks,
            nodes,
            math.inf if inside is None else inside,
            math.inf if between is None else between,
            profile.rank_latency_s or 0.0,
            profile.node_latency_s or 0.0,
            between_devices=profile.separate,
        )

    @classmethod
    def flat(cls, ranks: int, bytes_per_s: float) -> Network:
        """Ranks of which each sends `bytes_per_s` to any others, without latency."""
        return cls(1, ranks, math.inf, bytes_per_s)

    @property
    def ranks(self) -> int:
        """All ranks of the group."""
        return self.local_ranks * self.nodes

    def shard_group(self, ranks: int) -> Network:
        """Of so many ranks in a row, which share the chunks: parts of a node, or whole nodes.

        Raises ValueError if they are neither.
        """
        local = self._per_node(ranks)
        return replace(self, local_ranks=local, nodes=ranks // local)

    def replica_group(self, shard_ranks: int) -> Network:
        """The ranks that have the same shard, one of each shard group of `shard_ranks`.

        Its ranks use the links at the same time as those that have the other shards.

        Raises ValueError as shard_group() does.
        """
        local = self._per_node(shard_ranks)
        nodes = self.nodes // (shard_ranks // local)
        return replace(self, local_ranks=self.local_ranks // local, nodes=nodes)

    def _per_node(self, ranks: int) -> int:
        local = min(ranks, self.local_ranks)
        if self.local_ranks % local or ranks % local or self.nodes % (ranks // local):
            raise ValueError(
                f"a chunk cannot be shared by {ranks} ranks where there are {self.nodes} nodes with"
                f" {self.local_ranks} each; choose parts of a node, or whole nodes"
            )
        return local


def all_gather(network: Network, nbytes: float) -> CollectiveCost:
    """Every rank gets the whole of `nbytes`, of which each has an equal part.

    A ring of n ranks makes n - 1 steps, nodes - 1 of them between nodes (NCCL: tuning.cc, nsteps
    and nInterSteps), and a rank passes on n - 1 parts. As many rings as a node has ranks use all
    links at once: a node's adapters carry the bytes once for all its ranks, so that between nodes
    the bandwidth is the whole node's.
    """
    ranks, nodes = network.ranks, network.nodes
    latency_s = (ranks - nodes) * network.rank_latency_s + (nodes - 1) * network.node_latency_s
    sent = nbytes * (ranks - 1) / ranks
    bandwidths = [network.rank_bytes_per_s] if network.local_ranks > 1 else []
    if nodes > 1:
        bandwidths.append(network.local_ranks * network.node_bytes_per_s)
    transfer_s = sent / min(bandwidths, default=math.inf)
    return CollectiveCost(latency_s, transfer_s, sent, nodes > 1)


def all_to_all(network: Network, nbytes: float) -> CollectiveCost:
    """Every rank sends each other one its part of `nbytes`: the mean of a chunk's gradients.

    Pairwise: n - 1 messages, one after the other. Nothing is added up on the way, so each rank's
    adapter carries all that goes to other nodes; links inside a node work meanwhile. (Ranks that
    send to several others at once have less latency than this.)
    """
    ranks, local = network.ranks, network.local_ranks
    near, far = local - 1, ranks - local
    latency_s = near * network.rank_latency_s + far * network.node_latency_s
    part = nbytes / ranks
    near_s, far_s = near * part / network.rank_bytes_per_s, far * part / network.node_bytes_per_s
    return CollectiveCost(latency_s, max(near_s, far_s), (ranks - 1) * part, far > 0)


def replica_mean(network: Network, nbytes: float) -> tuple[CollectiveCost, CollectiveCost]:
    """Every replica gets the mean of all replicas' `nbytes`, which are one shard of a chunk.

    Each sends every other its part, and then the part of which it made the mean.
    """
    return all_to_all(network, nbytes), all_gather(network, nbytes)


def agreement_s(network: Network) -> float:
    """Seconds of a step's AGREEMENTS: all-reduces of so few bytes that only latency counts.

    Each is a sum up a binary tree and its way back down, or as many steps of recursive doubling
    twice.
    """
    inside = math.ceil(math.log2(network.local_ranks)) * network.rank_latency_s
    between = math.ceil(math.log2(network.nodes)) * network.node_latency_s
    return AGREEMENTS * 2 * (inside + between)
