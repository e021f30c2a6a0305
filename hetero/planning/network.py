"""The links between ranks, and what collectives take on them: latency, and bytes over bandwidth.

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
from typing import NamedTuple

from offload.profile.machine_profile import Profile

# All-reduces of a few numbers by which a step ends: which gradients there are, their norm, and that
# all ranks take the same step.
AGREEMENTS = 3


class CollectiveCost(NamedTuple):
    """What one collective takes on each rank.

    Attributes:
        latency_s: in which the links are free for another collective.
        transfer_s: for which it has the slowest link that it uses, alone.
        bytes_sent: to all others; parts of a byte are those of paddings.
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

    local_ranks: int = 1
    nodes: int = 1
    rank_bytes_per_s: float = math.inf
    node_bytes_per_s: float = math.inf
    rank_latency_s: float = 0.0
    node_latency_s: float = 0.0
    between_devices: bool = False

    @classmethod
    def of(cls, profile: Profile, local_ranks: int, nodes: int) -> Network | None:
        """That of `local_ranks` on each of `nodes` machines; `profile` is one rank's share of its.

        Returns None if the profile does not have the bandwidth that they need. Where the one
        between nodes is known and the one inside a node is not, the former is the slower one.
        Latencies that it does not have are zero.
        """
        links = ("rank_bytes_per_s", "node_bytes_per_s", "rank_latency_s", "node_latency_s")
        known = {name: getattr(profile, name) for name in links}
        if known["node_bytes_per_s" if nodes > 1 else "rank_bytes_per_s"] is None:
            return None
        known = {name: value for name, value in known.items() if value is not None}
        return cls(local_ranks, nodes, between_devices=profile.separate, **known)

    @property
    def ranks(self) -> int:
        """All ranks of the group."""
        return self.local_ranks * self.nodes

    def groups(self, ranks: int) -> tuple[Network, Network]:
        """Of `ranks` in a row, which share the chunks, and of those that have the same shard.

        The former are parts of a node, or whole nodes; the latter, one of each such group, use the
        links at the same time as those that have the other shards. Raises ValueError otherwise.
        """
        local = min(ranks, self.local_ranks)
        if self.local_ranks % local or ranks % local or self.nodes % (ranks // local):
            raise ValueError(
                f"a chunk cannot be shared by {ranks} ranks where there are {self.nodes} nodes with"
                f" {self.local_ranks} each; choose parts of a node, or whole nodes"
            )
        nodes = ranks // local
        others = self.local_ranks // local, self.nodes // nodes
        return (
            replace(self, local_ranks=local, nodes=nodes),
            replace(self, local_ranks=others[0], nodes=others[1]),
        )

    def all_gather(self, nbytes: float, times: int = 1) -> CollectiveCost:
        """Every rank gets the whole of `nbytes`, of which each has an equal part, in `times` turns.

        A ring of n ranks makes n - 1 steps, nodes - 1 of them between nodes (NCCL: tuning.cc,
        nsteps and nInterSteps), and a rank passes on n - 1 parts. As many rings as a node has ranks
        use all links at once: a node's adapters carry the bytes once for all its ranks, so that
        between nodes the bandwidth is the whole node's.
        """
        inside, between = self.ranks - self.nodes, self.nodes - 1
        sent = nbytes * (self.ranks - 1) / self.ranks
        bandwidths = [self.rank_bytes_per_s] if self.local_ranks > 1 else []
        if between:
            bandwidths.append(self.local_ranks * self.node_bytes_per_s)
        latency_s = inside * self.rank_latency_s + between * self.node_latency_s
        transfer_s = sent / min(bandwidths, default=math.inf)
        return CollectiveCost(times * latency_s, transfer_s, sent, between > 0)

    def all_to_all(self, nbytes: float, times: int = 1) -> CollectiveCost:
        """Every rank sends each other one its part of `nbytes`, in `times` turns: the means of
        chunks' gradients.

        Pairwise: n - 1 messages, one after the other. Nothing is added up on the way, so each
        rank's adapter carries all that goes to other nodes; links inside a node work meanwhile.
        (Ranks that send to several others at once have less latency than this.)
        """
        near, far = self.local_ranks - 1, self.ranks - self.local_ranks
        part = nbytes / self.ranks
        return CollectiveCost(
            times * (near * self.rank_latency_s + far * self.node_latency_s),
            max(near * part / self.rank_bytes_per_s, far * part / self.node_bytes_per_s),
            (self.ranks - 1) * part,
            far > 0,
        )

    def agreement_s(self) -> float:
        """Seconds of a step's AGREEMENTS: all-reduces of so few bytes that only latency counts.

        Each is a sum up a binary tree and its way back down, or as many steps of recursive doubling
        twice.
        """
        inside = math.ceil(math.log2(self.local_ranks)) * self.rank_latency_s
        between = math.ceil(math.log2(self.nodes)) * self.node_latency_s
        return AGREEMENTS * 2 * (inside + between)
