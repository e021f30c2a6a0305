"""What a step is predicted for, and what each of its transfers takes: bytes over a rate, and the
latency of messages.

Compute, the two directions of the link, the disk and the collectives are resources that work at
once, each of them on one transfer after the other. Collectives are of two streams, all-gathers and
gradient means, which wait for their own latency alone and share the links: those inside a node, and
the network between nodes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Layout
from hetero.overlap import OverlapUpdates
from hetero.planning.collective_cost import (
    CollectiveCost,
    Network,
    all_gather,
    all_to_all,
    replica_mean,
)
from hetero.planning.placement import SlotBytes
from hetero.planning.trace import Trace
from offload.profile.machine_profile import Rates

COMPUTE, H2D, D2H, NVME = "compute", "link to device", "link to RAM", "NVMe"
NODE_LINKS, NETWORK = "links in a node", "network"  # the latter between nodes
ALL_GATHERS, MEANS = "all-gathers", "gradient means"  # their latency included
CPU_UPDATE, DEVICE_UPDATE = "update in RAM", "update on device"
RESOURCES = (
    *(COMPUTE, H2D, D2H, NVME, NODE_LINKS, NETWORK, ALL_GATHERS, MEANS),
    *(CPU_UPDATE, DEVICE_UPDATE),
)


@dataclass(frozen=True)
class Problem:
    """A chunk group's step whose seconds are to be predicted, whatever its placement."""

    trace: Trace
    layout: Layout
    dtypes: Dtypes
    profile: Rates  # of one rank's share of its machine
    prefetch: bool = True  # parameters are fetched ahead of their use
    overlap: OverlapUpdates = OverlapUpdates.NONE  # what updates overlap with
    grad_factors: bool = False  # the norm of all gradients is taken before the update
    network: Network | None = None  # of all ranks; None: not known, and its time not counted
    undoable_steps: bool = False  # what updates change is kept on NVMe until the next step

    def __post_init__(self) -> None:
        shard = self.layout.shard
        if self.network is not None and self.network.ranks != shard.ranks * shard.replicas:
            raise ValueError(
                f"the network is of {self.network.ranks} ranks, and the layout of"
                f" {shard.ranks} times {shard.replicas}"
            )

    @property
    def between_devices(self) -> bool:
        """Whether the ranks' devices gather and average by themselves, and RAM does not."""
        known = self.network is not None and self.network.between_devices
        return known or self.layout.shard.between_devices


@dataclass(frozen=True)
class PhaseCost:
    """Seconds that a phase takes, and for which each resource is busy in it."""

    name: str
    seconds: float
    busy_s: Mapping[str, float]

    def plus(self, other: PhaseCost, times: int = 1) -> PhaseCost:
        """This phase plus `times` x `other`, under this one's name."""
        busy_s = Counter(self.busy_s)
        for name, seconds in other.busy_s.items():
            busy_s[name] += times * seconds  # type: ignore[assignment]
        return PhaseCost(self.name, self.seconds + times * other.seconds, busy_s)


class Transfers:
    """Adds up what a rank moves: bytes by kind of traffic, and seconds by resource."""

    def __init__(self) -> None:
        """Nothing is moved yet."""
        self.busy_s: dict[str, float] = dict.fromkeys(RESOURCES, 0.0)
        self.nbytes: Counter[str] = Counter()

    def move(self, resource: str, kind: str, nbytes: int, bytes_per_s: float) -> float:
        """Moves bytes on a resource; returns the seconds that it takes."""
        self.nbytes[kind] += nbytes
        self.busy_s[resource] += nbytes / bytes_per_s
        return nbytes / bytes_per_s

    def communicate(self, stream: str, cost: CollectiveCost) -> float:
        """One collective of a stream, on the links; returns the seconds that it takes."""
        self.nbytes["sent"] += round(cost.bytes_sent)
        self.busy_s[NETWORK if cost.crosses_nodes else NODE_LINKS] += cost.transfer_s
        self.busy_s[stream] += cost.seconds
        return cost.seconds


class Collectives:
    """What the collectives of a problem's chunks cost; without a known network only bytes."""

    def __init__(self, problem: Problem) -> None:
        """Those of the ranks that `problem` has."""
        self._slot = SlotBytes.of(problem.layout, problem.dtypes)
        self._shard = shard = problem.layout.shard
        network = problem.network or Network.flat(shard.ranks * shard.replicas, math.inf)
        self._sharing = network.shard_group(shard.ranks)
        self._replicas = network.replica_group(shard.ranks)

    def gather(self, slots: int) -> CollectiveCost:
        """The all-gather of a chunk of so many slots."""
        return all_gather(self._sharing, slots * self._slot.gathered)

    def mean(self, slots: int) -> list[CollectiveCost]:
        """The mean of a chunk's gradients: of the ranks that share it, then of the replicas."""
        made = []
        bucket = slots * self._slot.bucket
        if self._shard.ranks > 1:
            made.append(all_to_all(self._sharing, bucket))
        if self._shard.replicas > 1:
            made += replica_mean(self._replicas, bucket / self._shard.ranks)
        return made


def disk_rates(profile: Rates, both: bool) -> tuple[float, float]:
    """Of reads and of writes; without a disk nothing is ever divided by them."""
    if both and profile.nvme_mixed_bytes_per_s:
        return profile.nvme_mixed_bytes_per_s, profile.nvme_mixed_bytes_per_s
    return profile.nvme_read_bytes_per_s or 1.0, profile.nvme_write_bytes_per_s or 1.0
