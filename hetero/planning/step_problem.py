"""The step that is predicted, and its transfers: bytes over a rate, and latencies of messages.

Compute, the two directions of the link, the disk and the collectives are resources that work at
once, each of them on one transfer after the other. Collectives are of two streams, all-gathers and
gradient means, which wait for their own latency alone and share the links: those inside a node, and
the network between nodes.
"""

from __future__ import annotations

import enum
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
from offload.profile.machine_profile import Rates

COMPUTE, H2D, D2H, NVME = "compute", "link to device", "link to RAM", "NVMe"
NODE_LINKS, NETWORK = "links in a node", "network"  # the latter between nodes
ALL_GATHERS, MEANS = "all-gathers", "gradient means"  # their latency included
CPU_UPDATE, DEVICE_UPDATE = "update in RAM", "update on device"
RESOURCES = (
    *(COMPUTE, H2D, D2H, NVME, NODE_LINKS, NETWORK, ALL_GATHERS, MEANS),
    *(CPU_UPDATE, DEVICE_UPDATE),
)


class Phase(enum.Enum):
    """Parts of a step that compute with chunks; a step with several micro-batches alternates."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Work:
    """What a rank computes in a step."""

    tokens: int  # of one micro-batch
    micro_batches: int = 1
    checkpointing: bool = False  # backward computes forward once more


@dataclass(frozen=True)
class Computing:
    """Seconds of a step, of all micro-batches, that compute takes alone, without any transfer."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Trace(Computing):
    """A step of a chunk group; forward uses chunks in use_order(), backward in the reverse."""

    micro_batches: int  # forwards, each with its backward
    expected: bool = False  # the seconds were not measured


def use_order(layout: Layout) -> list[int]:
    """The chunks in the order of registration: by the place of their first parameters."""
    order = sorted(layout.chunks, key=lambda c: min(s.param.index for s in c.slices))
    return [chunk.id for chunk in order]


def expected_trace(layout: Layout, work: Work, flop_per_s: float) -> Trace:
    """A trace before any step was measured.

    Computing takes 2 floating-point operations per parameter and token in forward and 4 in backward
    (6 if it computes forward again). Attention's own products, which grow with the sequence, are
    left out: they are few beside these unless sequences are longer than some six times the width of
    the model.
    """
    second = layout.numel * work.tokens * work.micro_batches / flop_per_s
    backward_s = (6 if work.checkpointing else 4) * second
    return Trace(2 * second, backward_s, work.micro_batches, expected=True)


# Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
# equation 1: a layer saves s b h (34 + 5 a s / h) bytes in 16 bits. The second term is the matrix
# of attention, which scaled_dot_product_attention does not keep; of the 34 bytes an element, 32 are
# 16 numbers and 2 are masks of dropout.
_NUMBERS, _MASK_BYTES = 16, 2


@dataclass(frozen=True)
class ActivationEstimate:
    """Bytes of one micro-batch of a rank; logits and temporaries are not in it.

    Attributes:
        kept_bytes: all layers keep what they save.
        checkpointed_bytes: each keeps its input, and the one that is computed again all it saves.
    """

    kept_bytes: int
    checkpointed_bytes: int

    @classmethod
    def of(cls, layers: int, width: int, tokens: int, element_bytes: int) -> ActivationEstimate:
        """Of so many layers over vectors of `width` elements of `element_bytes`."""
        numbers = tokens * width
        layer = numbers * (_NUMBERS * element_bytes + _MASK_BYTES)
        return cls(layers * layer, layers * numbers * element_bytes + layer)


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


class StepTransfers:
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


class CollectiveCosts:
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
