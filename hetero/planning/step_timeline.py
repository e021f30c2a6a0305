"""One step's forward and backward, use by use: when each resource is free, and when it is busy.

Compute, the two directions of the link, the disk and the collectives work at once, each of them on
one transfer after the other. Collectives are of two streams, all-gathers and gradient means, which
wait for their own latency alone and share the links: those inside a node, and the network between
nodes. What the timeline knows:

- A gathered chunk is fetched when a use begins, its room is free (`belady.py`) and it is among the
  next PREFETCH_CHUNKS; from the file, from other ranks, then over the link, as far as it must. If
  the collectives are between devices, this rank's shard crosses the link first.
- A gradient leaves after its chunk's use in a backward: over the link, to other ranks, to the
  file; between devices to other ranks first. Where buckets have run out, that use waits for the
  oldest mean.
- All ranks are alike: none waits for a slower one (bench.scaling simulates those).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Layout
from hetero.overlap import OverlapUpdates
from hetero.planning.belady import PREFETCH_CHUNKS, PlannedFetch, step_fetches
from hetero.planning.collective_cost import (
    CollectiveCost,
    Network,
    all_gather,
    all_to_all,
    replica_mean,
)
from hetero.planning.placement import Placement, SlotBytes
from hetero.planning.trace import Phase, Trace, use_order
from offload.memory.tiers import Tier
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
        """This phase and so many `times` another one, under this one's name."""
        busy_s = {
            name: self.busy_s.get(name, 0.0) + times * other.busy_s.get(name, 0.0)
            for name in {**self.busy_s, **other.busy_s}
        }
        return PhaseCost(self.name, self.seconds + times * other.seconds, busy_s)


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


@dataclass(frozen=True)
class Segment:
    """Forward or backward of a micro-batch, which comes `weight` times in a step."""

    phase: Phase
    weight: int
    chunks: list[int]  # in the order of their uses
    first: bool  # of the step's micro-batches
    element_s: float  # of computing, per element


class StepTimeline:
    """When each resource is free, and what each segment has made it do."""

    def __init__(self, problem: Problem, made: Placement, gathered: Collection[int]) -> None:
        """Nothing has happened yet.

        Args:
            problem: the step.
            made: where everything is.
            gathered: ids of the chunks that compute finds in gathered slots only.
        """
        self._problem = problem
        self._made = made
        self._gathered = gathered
        self._profile = problem.profile
        self._slot = SlotBytes.of(problem.layout, problem.dtypes)
        self._slots = {chunk.id: chunk.slots for chunk in problem.layout.chunks}
        self._collectives = Collectives(problem)
        self._between_devices = problem.between_devices
        self._now_s = 0.0  # of compute
        self._free_s = dict.fromkeys((NVME, H2D, D2H, ALL_GATHERS, MEANS), 0.0)
        # What both streams of collectives have given links to carry, since they could not have.
        self._left_s = {NODE_LINKS: 0.0, NETWORK: 0.0}
        self._busy_s: dict[str, float] = {}
        self._nbytes: Counter[str] = Counter()
        self._in_buckets: deque[tuple[int, float]] = deque()  # slots, and the end of the mean

    def walk(self, segments: list[Segment]) -> Iterator[tuple[PhaseCost, Counter[str]]]:
        """For each segment its seconds since the one before, and the bytes that it moved."""
        made, chunks = self._made, self._problem.layout.chunks
        trained = {chunk.id for chunk in chunks if chunk.trainable}
        numel = {chunk.id: sum(s.param.numel for s in chunk.slices) for chunk in chunks}
        uses = [c for segment in segments for c in segment.chunks if c in self._gathered]
        coming = deque(step_fetches(uses, self._problem.layout, made.gathered_slots))
        ready_s: dict[int, float] = {}
        use = 0  # number of the next one of a gathered chunk
        for segment in segments:
            began_s = self._now_s
            self._busy_s, self._nbytes = dict.fromkeys(RESOURCES, 0.0), Counter()
            backward = segment.phase is Phase.BACKWARD
            self._rates = disk_rates(self._profile, backward and Tier.DISK in made.grad)
            for chunk in segment.chunks:
                if chunk in self._gathered:
                    if coming and coming[0].use == use:
                        coming.popleft()
                        ready_s[use] = self._fetch(chunk)
                    self._now_s = max(self._now_s, ready_s.pop(use, 0.0))
                    # What comes next, as far as its room is free: nearest first.
                    while coming and self._is_ahead(coming[0], use):
                        fetch = coming.popleft()
                        ready_s[fetch.use] = self._fetch(uses[fetch.use])
                    use += 1
                if backward and chunk in trained:
                    self._wait_for_bucket(self._slots[chunk])
                computing_s = numel[chunk] * segment.element_s
                self._now_s += computing_s
                self._busy_s[COMPUTE] += computing_s
                if backward and chunk in trained:
                    self._gradient(chunk, numel[chunk], segment.first)
            is_last = segment is segments[-1]
            if is_last:
                self._now_s = max(self._now_s, *self._free_s.values())
            self._share_links(began_s, is_last)
            yield PhaseCost(segment.phase.value, self._now_s - began_s, self._busy_s), self._nbytes

    def _share_links(self, began_s: float, is_last: bool) -> None:
        """Links carry the bytes of both streams one after the other: in the end all of them."""
        for link, left_s in self._left_s.items():
            carried_s = left_s + self._busy_s[link]
            if is_last:
                self._now_s = max(self._now_s, began_s + carried_s)
            self._left_s[link] = max(0.0, carried_s - (self._now_s - began_s))

    def _is_ahead(self, fetch: PlannedFetch, use: int) -> bool:
        near = fetch.use <= use + PREFETCH_CHUNKS
        return self._problem.prefetch and near and fetch.after < use

    def _fetch(self, chunk: int) -> float:
        """Begins now; returns when the chunk is in its slot."""
        profile, shard = self._profile, self._problem.layout.shard
        home = self._made.param[chunk]
        slots = self._slots[chunk]
        ready_s = self._now_s
        if home is Tier.DISK:
            nbytes = slots * self._slot.param
            self._nbytes["nvme_read"] += nbytes
            ready_s = self._move(NVME, nbytes / self._rates[0], ready_s)
        over_link = slots * self._slot.gathered
        elsewhere = shard.ranks > 1 and shard.params
        if elsewhere and not self._between_devices:
            ready_s = self._communicate(ALL_GATHERS, self._collectives.gather(slots), ready_s)
        elif elsewhere:
            over_link = slots * self._slot.param
        if home is not Tier.DEVICE and profile.h2d_bytes_per_s is not None:
            self._nbytes["h2d"] += over_link
            ready_s = self._move(H2D, over_link / profile.h2d_bytes_per_s, ready_s)
        if elsewhere and self._between_devices:
            ready_s = self._communicate(ALL_GATHERS, self._collectives.gather(slots), ready_s)
        return ready_s

    def _gradient(self, chunk: int, numel: int, first: bool) -> None:
        """The chunk's gradient leaves; it is the `first` of the step, or added to those."""
        profile, shard = self._profile, self._problem.layout.shard
        slots = self._slots[chunk]
        ready_s = self._now_s
        home = self._made.grad[chunk]
        means = self._collectives.mean(slots) if shard.grads else []
        if self._between_devices:
            ready_s = self._average(means, ready_s)
        if home is not Tier.DEVICE and profile.d2h_bytes_per_s is not None:
            nbytes = numel * self._problem.dtypes.param_bytes
            if means and self._between_devices:  # the mean of this rank's shard alone
                nbytes = slots * self._slot.grad
            self._nbytes["d2h"] += nbytes
            ready_s = self._move(D2H, nbytes / profile.d2h_bytes_per_s, ready_s)
        if not self._between_devices:
            ready_s = self._average(means, ready_s)
        if means:
            self._in_buckets.append((slots, self._free_s[MEANS]))
        if home is Tier.DISK:
            nbytes = slots * self._slot.grad
            reading, writing = self._rates
            self._nbytes["nvme_written"] += nbytes
            seconds = nbytes / writing
            if not first:
                self._nbytes["nvme_read"] += nbytes
                seconds += nbytes / reading
            self._move(NVME, seconds, ready_s)

    def _wait_for_bucket(self, slots: int) -> None:
        limit = self._made.bucket_slots
        while limit and sum(taken for taken, _ in self._in_buckets) + slots > limit:
            if not self._in_buckets:
                return  # one of its own, as large as it must be
            self._now_s = max(self._now_s, self._in_buckets.popleft()[1])

    def _average(self, means: list[CollectiveCost], ready_s: float) -> float:
        for mean in means:
            ready_s = self._communicate(MEANS, mean, ready_s)
        return ready_s

    def _communicate(self, stream: str, cost: CollectiveCost, ready_s: float) -> float:
        self._nbytes["sent"] += round(cost.bytes_sent)
        self._busy_s[NETWORK if cost.crosses_nodes else NODE_LINKS] += cost.transfer_s
        return self._move(stream, cost.seconds, ready_s)

    def _move(self, resource: str, seconds: float, ready_s: float) -> float:
        """Keeps the resource busy from when it is free and all is `ready_s`; returns the end."""
        self._free_s[resource] = max(self._free_s[resource], ready_s) + seconds
        self._busy_s[resource] += seconds
        return self._free_s[resource]


def disk_rates(profile: Rates, both: bool) -> tuple[float, float]:
    """Of reads and of writes; without a disk nothing is ever divided by them."""
    if both and profile.nvme_mixed_bytes_per_s:
        return profile.nvme_mixed_bytes_per_s, profile.nvme_mixed_bytes_per_s
    return profile.nvme_read_bytes_per_s or 1.0, profile.nvme_write_bytes_per_s or 1.0


def segments(layout: Layout, trace: Trace) -> list[Segment]:
    """Of many micro-batches, which are alike, three stand for all."""
    count, order = trace.micro_batches, use_order(layout)
    numel = layout.numel * max(1, count)
    made: list[Segment] = []
    for number, weight in enumerate([1, count - 2, 1] if count > 3 else [1] * count):
        first = number == 0
        made += [
            Segment(Phase.FORWARD, weight, order, first, trace.forward_s / numel),
            Segment(Phase.BACKWARD, weight, order[::-1], first, trace.backward_s / numel),
        ]
    return made
