"""What a training step takes under a placement: bytes moved, and seconds by phase and resource.

It is a roofline. Compute, the two directions of the link, the disk, the network and updates are
resources that work at once, each on one thing after the other: bytes over a rate, and latencies of
messages. A phase takes as long as its busiest resource, or as compute and what nothing hides:

- A gathered chunk's way is from the file, from other ranks, over the link, as far as it must. It is
  hidden behind what is computed between the use that its room is free after (`belady.py`), or the
  one PREFETCH_CHUNKS before, and its own; compute waits for the rest.
- Where buckets for gradients have room for one chunk alone, compute waits for each mean.
- At one end of a phase the busiest resource waits for the computing of one chunk; when backward
  ends, all wait for the last gradient.
- The update begins when all gradients are there, and all ranks have agreed on the step. It goes
  through tiles, with a disk that reads and writes at once. Of T tiles whose optimizer state or
  parameter is in the file, B buffers save min(B, T) reads and writes of optimizer states, and reads
  of parameters. What is on DEVICE is updated there meanwhile.
- overlap_updates says which phases and the update are one. The order is the same in every step
  then, so all buffers but STREAMING_BUFFERS save reads and writes. What backward updates, it writes
  with the old parameters, if these are in RAM; all such guesses are right.

Bytes are exact. All ranks are alike: none waits for a slower one (docs/scaling.md has those).
"""

from __future__ import annotations

import enum
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Layout
from hetero.overlap import STREAMING_BUFFERS, OverlapUpdates
from hetero.planning.belady import PREFETCH_CHUNKS, step_fetches
from hetero.planning.group_plans import ChunkGroupPlan
from hetero.planning.network import CollectiveCost, Network
from hetero.planning.placement import Placement, SlotBytes
from offload.memory.tiers import Tier
from offload.profile.machine_profile import Rates

COMPUTE, H2D, D2H, NVME = "compute", "link to device", "link to RAM", "NVMe"
NODE_LINKS, NETWORK = "links in a node", "network"  # the latter between nodes
# Two streams, which wait for their own latency alone and share the links.
ALL_GATHERS, MEANS = "all-gathers", "gradient means"
CPU_UPDATE, DEVICE_UPDATE = "update in RAM", "update on device"
RESOURCES = (
    *(COMPUTE, H2D, D2H, NVME, NODE_LINKS, NETWORK, ALL_GATHERS, MEANS),
    *(CPU_UPDATE, DEVICE_UPDATE),
)
TRAFFIC = ("h2d", "d2h", "nvme_read", "nvme_written", "sent")  # the last one: to other ranks


class Phase(enum.Enum):
    """Parts of a step that compute with chunks; a step with several micro-batches alternates."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Work:
    """What a rank computes in a step."""

    tokens: int  # of one micro-batch
    micro_batches: int = 1  # forwards, each with its backward
    checkpointing: bool = False  # backward computes forward once more


@dataclass(frozen=True)
class Computing:
    """Seconds of a step, of all micro-batches, that compute takes alone, without any transfer."""

    forward_s: float
    backward_s: float
    expected: bool = False  # they were not measured


def expected_computing(layout: Layout, work: Work, flop_per_s: float) -> Computing:
    """What computing with all parameters is expected to take before any step was measured.

    It takes 2 floating-point operations per parameter and token in forward. In backward it takes 2
    for the gradient of the input, 2 for the parameter's own if it is trainable, and 2 where forward
    is computed again. Attention's own products, which grow with the sequence, are left
    out: they are few beside these unless sequences are longer than some six times the width of the
    model.
    """
    trained = sum(s.param.numel for c in layout.chunks if c.trainable for s in c.slices)
    once_s = 2 * work.tokens * work.micro_batches / flop_per_s  # of an element
    inputs_s = once_s * layout.numel * (2 if work.checkpointing else 1)
    return Computing(once_s * layout.numel, inputs_s + once_s * trained, expected=True)


@dataclass(frozen=True)
class Problem:
    """A chunk group's step whose seconds are to be predicted, whatever its placement.

    Chunks are used in the order of registration, in backward in the reverse.
    """

    computing: Computing
    micro_batches: int
    layout: Layout
    dtypes: Dtypes
    profile: Rates  # of one rank's share of its machine
    prefetch: bool = True  # parameters are fetched ahead of their use
    overlap: OverlapUpdates = OverlapUpdates.NONE  # what updates overlap with
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


@dataclass
class PhaseCost:
    """Seconds that a phase takes, for which each resource is busy, and bytes by TRAFFIC."""

    name: str
    seconds: float = 0.0
    busy_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    traffic: Counter[str] = field(default_factory=Counter)

    def move(self, resource: str, kind: str, nbytes: int, bytes_per_s: float | None) -> float:
        """Adds bytes that a resource moves, and returns its seconds; None: it is not there."""
        if bytes_per_s is None:
            return 0.0
        self.traffic[kind] += nbytes
        self.busy_s[resource] += nbytes / bytes_per_s
        return nbytes / bytes_per_s

    def communicate(self, stream: str, costs: Sequence[CollectiveCost]) -> float:
        """Adds collectives of a stream, one after the other, and returns their seconds."""
        for cost in costs:
            self.traffic["sent"] += round(cost.bytes_sent)
            self.busy_s[NETWORK if cost.crosses_nodes else NODE_LINKS] += cost.transfer_s
            self.busy_s[stream] += cost.seconds
        return sum(cost.seconds for cost in costs)

    def plus(self, other: PhaseCost, times: int = 1) -> PhaseCost:
        """This phase plus `times` x `other`, under this one's name."""
        busy_s, traffic = self.busy_s.copy(), self.traffic.copy()
        for name, seconds in other.busy_s.items():
            busy_s[name] += times * seconds
        for name, nbytes in other.traffic.items():
            traffic[name] += times * nbytes
        return PhaseCost(self.name, self.seconds + times * other.seconds, busy_s, traffic)


@dataclass(frozen=True)
class StepCost:
    """What one step of a rank takes, once many have been made."""

    phases: tuple[PhaseCost, ...]

    @property
    def _total(self) -> PhaseCost:
        return reduce(PhaseCost.plus, self.phases, PhaseCost("step"))

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self._total.seconds

    @property
    def traffic(self) -> Counter[str]:
        """Bytes by TRAFFIC."""
        return self._total.traffic

    @property
    def busy_s(self) -> dict[str, float]:
        """Seconds by resource, of those that are used at all."""
        total = self._total.busy_s
        return {name: total[name] for name in RESOURCES if total[name]}

    @property
    def bound(self) -> str:
        """The resource that is busiest."""
        busy = self.busy_s
        return max(busy, key=busy.__getitem__, default=COMPUTE)


class CostModel:
    """Predicts the steps of one problem under any placement."""

    def __init__(self, problem: Problem) -> None:
        """Nothing is predicted yet."""
        self.problem = problem
        self.slot = SlotBytes.of(problem.layout, problem.dtypes)
        chunks, shard = problem.layout.chunks, problem.layout.shard
        self.slots = {chunk.id: chunk.slots for chunk in chunks}
        self.numel = {chunk.id: sum(s.param.numel for s in chunk.slices) for chunk in chunks}
        self.trained = [chunk.id for chunk in chunks if chunk.trainable]
        by_registration = sorted(chunks, key=lambda c: min(s.param.index for s in c.slices))
        self.order = [chunk.id for chunk in by_registration]
        # Without a known network collectives have bytes and no seconds.
        network = problem.network or Network.flat(shard.ranks * shard.replicas, math.inf)
        self._sharing, self._replicas = network.groups(shard.ranks)

    def cost(self, made: Placement) -> StepCost:
        """What a step takes under the placement `made`.

        Raises:
            ValueError: the profile says nothing about updates in these dtypes, or about a disk.
        """
        profile, overlap = self.problem.profile, self.problem.overlap
        uses_disk = Tier.DISK in (*made.param, *made.grad, *made.optim_state)
        if uses_disk and profile.nvme_read_bytes_per_s is None:
            raise ValueError(
                f"the profile {profile.name!r} says nothing about NVMe; measure it again"
            )
        phases, update = self._computing_phases(made), self._update(made)
        # Updates of what is on NVMe may begin in backward; and go on after step(), by default not
        # if all is where compute uses it. Forward comes first, and backward last.
        late = overlap.in_forward
        if overlap is OverlapUpdates.AUTO and not self.gathered(made):
            late = Tier.DISK in made.optim_state
        early = overlap.in_backward and Tier.DISK in made.optim_state
        begin, end = 0 if late else len(phases) - 1, len(phases) if early else 1
        if phases and begin < end:
            phases[begin:end] = [self._together(phases[begin:end], update, made)]
        else:
            phases.append(update)
        return StepCost(tuple(phases))

    def gathered(self, made: Placement) -> set[int]:
        """Ids of the chunks that compute finds in gathered slots only, under `made`."""
        shard = self.problem.layout.shard
        if shard.ranks > 1 and shard.params:
            return set(self.slots)
        here = Tier.DEVICE if self.problem.profile.separate else Tier.HOST
        return {chunk for chunk in self.slots if made.param[chunk] is not here}

    def _computing_phases(self, made: Placement) -> list[PhaseCost]:
        """Forward and backward of all micro-batches; of many, which are alike, three stand for
        all."""
        problem, count = self.problem, self.problem.micro_batches
        times = [1, count - 2, 1] if count > 3 else [1] * count
        gathered = self.gathered(made)
        passes = {Phase.FORWARD: self.order, Phase.BACKWARD: self.order[::-1]}
        uses = [c for _ in times for chunks in passes.values() for c in chunks if c in gathered]
        fetches = step_fetches(uses, problem.layout, made.gathered_slots)
        room_after = {fetch.use: fetch.after for fetch in fetches}
        found = {phase: PhaseCost(phase.value) for phase in passes if count}
        ends_s, now_s = [0.0], 0.0  # of computing, after each use of a gathered chunk, and now
        for number, weight in enumerate(times):
            for phase, chunks in passes.items():
                backward = phase is Phase.BACKWARD
                one, waited_s, last_s = PhaseCost(phase.value), 0.0, 0.0
                computing = problem.computing
                compute_s = (computing.backward_s if backward else computing.forward_s) / count
                mixes = backward and Tier.DISK in made.grad
                for chunk in chunks:
                    use = len(ends_s) - 1
                    if chunk in gathered and use in room_after:
                        way_s = self._fetch(one, made, chunk, mixes)
                        ahead = min(PREFETCH_CHUNKS, use - 1 - room_after[use])
                        if ahead and problem.prefetch:  # as many others are on their way
                            way_s = (way_s - now_s + ends_s[use - ahead]) / ahead
                        waited_s += max(0.0, way_s)
                    now_s += compute_s * self.numel[chunk] / problem.layout.numel
                    if chunk in gathered:
                        ends_s.append(now_s)
                    if backward and made.grad[chunk] is not None:
                        means_s, last_s = self._gradient(one, made, chunk, adds=number > 0)
                        if 2 * self.slots[chunk] > made.bucket_slots:  # no bucket for another
                            waited_s += means_s
                        else:
                            last_s += means_s
                if backward and number == len(times) - 1:
                    waited_s += last_s
                busiest_s = max(one.busy_s.values(), default=0.0)
                if busiest_s:
                    busiest_s += compute_s / len(chunks)
                one.busy_s[COMPUTE] = compute_s
                one.seconds = max(compute_s + waited_s, busiest_s)
                found[phase] = found[phase].plus(one, weight)
        return list(found.values())

    def _fetch(self, work: PhaseCost, made: Placement, chunk: int, mixes: bool) -> float:
        """The chunk comes into a gathered slot; returns the seconds of its way.

        `mixes`: the disk writes meanwhile.
        """
        shard, profile = self.problem.layout.shard, self.problem.profile
        home, slots = made.param[chunk], self.slots[chunk]
        elsewhere = shard.ranks > 1 and shard.params
        seconds = 0.0
        if home is Tier.DISK:
            reading, _ = disk_rates(profile, mixes)
            seconds += work.move(NVME, "nvme_read", slots * self.slot.param, reading)
        if elsewhere:
            gather = self._sharing.all_gather(slots * self.slot.gathered)
            seconds += work.communicate(ALL_GATHERS, [gather])
        if home is not Tier.DEVICE:
            shared = elsewhere and self.problem.between_devices
            nbytes = slots * (self.slot.param if shared else self.slot.gathered)
            seconds += work.move(H2D, "h2d", nbytes, profile.h2d_bytes_per_s)
        return seconds

    def _gradient(
        self, work: PhaseCost, made: Placement, chunk: int, adds: bool
    ) -> tuple[float, float]:
        """The chunk's gradient goes home; returns seconds of its means, and of the rest of its way.

        `adds`: to what is there.
        """
        profile, home, slots = self.problem.profile, made.grad[chunk], self.slots[chunk]
        means = self._means(slots) if self.problem.layout.shard.grads else []
        means_s, seconds = work.communicate(MEANS, means), 0.0
        if home is not Tier.DEVICE:
            nbytes = self.numel[chunk] * self.problem.dtypes.param_bytes
            if means and self.problem.between_devices:  # the mean of this rank's shard alone
                nbytes = slots * self.slot.grad
            seconds += work.move(D2H, "d2h", nbytes, profile.d2h_bytes_per_s)
        if home is Tier.DISK:
            reading, writing = disk_rates(profile, True)
            seconds += work.move(NVME, "nvme_written", slots * self.slot.grad, writing)
            if adds:
                seconds += work.move(NVME, "nvme_read", slots * self.slot.grad, reading)
        return means_s, seconds

    def _means(self, slots: int) -> list[CollectiveCost]:
        """The mean of a chunk's gradients: of the ranks that share it, then of the replicas, of
        which each sends every other its part, and then the part of which it made the mean."""
        shard, bucket = self.problem.layout.shard, slots * self.slot.bucket
        made = [self._sharing.all_to_all(bucket)] if shard.ranks > 1 else []
        if shard.replicas > 1:
            mine = bucket / shard.ranks
            made += [self._replicas.all_to_all(mine), self._replicas.all_gather(mine)]
        return made

    def _update(self, made: Placement) -> PhaseCost:
        """The update, and what ranks do around it."""
        problem, profile, slot = self.problem, self.problem.profile, self.slot
        per_element = problem.dtypes.update_bytes / problem.layout.shard.ranks
        dtype = problem.dtypes.compute
        numel = sum(self.numel[c] for c in self.trained)
        on_device = sum(self.numel[c] for c in self.trained if made.optim_state[c] is Tier.DEVICE)
        host_s = device_s = 0.0
        if numel > on_device:
            host_s = (numel - on_device) * per_element / profile.rate("update_bytes_per_s", dtype)
        if on_device:
            device_s = on_device * per_element / profile.rate("device_update_bytes_per_s", dtype)

        def slots(homes: Sequence[Tier | None]) -> int:
            return sum(self.slots[c] for c in self.trained if homes[c] is Tier.DISK)

        optim_states, params, grads = slots(made.optim_state), slots(made.param), slots(made.grad)
        cached, kept = self._kept(made)
        missed = (cached - kept) / cached if cached else 0.0
        if problem.overlap is OverlapUpdates.BACKWARD:
            grads = 0  # gradients are used where they arrive
        read = round((optim_states * slot.optim_state + params * slot.param) * missed)
        read += grads * slot.grad
        written = round(optim_states * slot.optim_state * missed) + params * slot.param
        if problem.overlap.in_backward:
            both = zip(made.optim_state, made.param, strict=True)
            old = {c for c, homes in enumerate(both) if homes == (Tier.DISK, Tier.HOST)}
            written += round(sum(self.slots[c] for c in old) * slot.param * missed)
        nvme_s = _nvme_seconds(profile, read, written)
        seconds = max(host_s, nvme_s)
        # Beside forward and backward the CPU takes twice as long, which few buffers do not hide.
        alone_s = 2 * host_s if problem.overlap.repeats else host_s
        if made.buffers == 1:
            seconds = alone_s + nvme_s
        elif made.buffers == 2:
            seconds += min(alone_s, nvme_s) / 2
        if read:
            # At the ends one waits for the other: for the first gradient, or the first free buffer,
            # and for the last read.
            tiles = math.ceil(max(cached - kept, grads))
            seconds += nvme_s * read / (read + written) / max(1, tiles)
        work = PhaseCost("update")
        work.seconds = self._communicate_at_end(work, made)
        work.seconds += max(min(seconds, alone_s + nvme_s), device_s)
        work.busy_s.update({CPU_UPDATE: host_s, NVME: nvme_s, DEVICE_UPDATE: device_s})
        work.traffic.update(nvme_read=read, nvme_written=written)
        return work

    def _kept(self, made: Placement) -> tuple[int, int]:
        """Tiles whose updates take a buffer, and how many of them stay there for the next step."""
        homes = zip(made.optim_state, made.param, strict=True)
        in_file = [c for c, tiers in enumerate(homes) if Tier.DISK in tiers]
        cached = sum(self.slots[c] for c in in_file if made.optim_state[c] is not None)
        lacking = max(0, cached - made.buffers)
        if self.problem.overlap.repeats:
            lacking = min(cached, lacking + min(STREAMING_BUFFERS, lacking))
        return cached, cached - lacking

    def _together(
        self, phases: Sequence[PhaseCost], update: PhaseCost, made: Placement
    ) -> PhaseCost:
        """Phases and the updates that go on in them: the busiest resource of all says how long.

        If the CPU computes, its updates take its time. Those of the chunk that backward comes to
        last, and forward first, go on alone. If there is a choice, gradients that have a home in
        RAM are those that wait for forward, the others hold slots that backward needs.
        """
        both = reduce(PhaseCost.plus, [*phases, update])
        busiest_s = max(both.busy_s.values())
        if not self.problem.profile.separate:
            busiest_s = max(busiest_s, both.busy_s[COMPUTE] + both.busy_s[CPU_UPDATE])
        trained = sum(self.numel[c] for c in self.trained)
        first = next((self.numel[c] for c in self.order if c in self.trained), 0)
        alone_s = sum(each.seconds for each in phases)
        alone_s += max(update.busy_s[CPU_UPDATE], update.busy_s[NVME]) * first / max(1, trained)
        if len(phases) > 1:
            early = sum(self.slots[c] for c in self.trained if made.grad[c] is Tier.DISK)
            share = early / max(1, sum(self.slots[c] for c in self.trained))
            alone_s += max(0.0, share * update.seconds - phases[-1].seconds)
        *names, last = [each.name for each in (*phases, update)]
        both.name = f"{', '.join(names)} and {last}"
        both.seconds = max(alone_s, update.seconds, busiest_s)
        return both

    def _communicate_at_end(self, work: PhaseCost, made: Placement) -> float:
        """What ranks do around the update; returns its seconds.

        They agree on the step, and average gradients (stage 1) and gather parameters (stages 1 and
        2) that they have whole. Between devices what is at home in RAM crosses the link for that.
        """
        problem, shard, profile = self.problem, self.problem.layout.shard, self.problem.profile
        total_s = 0.0 if problem.network is None else problem.network.agreement_s()
        for chunk in self.trained:
            slots, up, down = self.slots[chunk], 0, 0
            means = [] if shard.grads else self._means(slots)
            total_s += work.communicate(MEANS, means)
            if means and made.grad[chunk] is not Tier.DEVICE:
                up, down = slots * self.slot.bucket, slots * self.slot.bucket // shard.ranks
            if shard.ranks > 1 and not shard.params:
                whole = slots * self.slot.gathered
                total_s += work.communicate(ALL_GATHERS, [self._sharing.all_gather(whole)])
                if made.param[chunk] is not Tier.DEVICE:
                    up += whole // shard.ranks
                    down += whole - whole // shard.ranks
            if problem.between_devices:
                total_s += work.move(H2D, "h2d", up, profile.h2d_bytes_per_s)
                total_s += work.move(D2H, "d2h", down, profile.d2h_bytes_per_s)
        return total_s


def disk_rates(profile: Rates, both: bool) -> tuple[float, float]:
    """Of reads and of writes; without a disk nothing is ever divided by them."""
    if both and profile.nvme_mixed_bytes_per_s:
        return profile.nvme_mixed_bytes_per_s, profile.nvme_mixed_bytes_per_s
    return profile.nvme_read_bytes_per_s or 1.0, profile.nvme_write_bytes_per_s or 1.0


def _nvme_seconds(profile: Rates, read: int, written: int) -> float:
    """As much of both as there is goes at the mixed rate, the rest alone."""
    reading, writing = disk_rates(profile, False)
    mixed, _ = disk_rates(profile, True)
    both = min(read, written)
    return 2 * both / mixed + (read - both) / reading + (written - both) / writing


@dataclass(frozen=True)
class Plan:
    """A chunk group's placement, and the step that it is predicted to take."""

    group: ChunkGroupPlan
    problem: Problem
    cost: StepCost

    @property
    def placement(self) -> Placement:
        """Where the chunk group's state is."""
        return self.group.placement


def predict(
    groups: Sequence[ChunkGroupPlan],
    rates: Rates,
    work: Work,
    computing: Computing | None = None,
    *,
    prefetch: bool = True,
    overlap: OverlapUpdates = OverlapUpdates.NONE,
    network: Network | None = None,
) -> list[Plan]:
    """What a step of chunk groups takes on one rank.

    Args:
        groups: all of a model.
        rates: the rank's share of its machine; a Profile where `computing` is None.
        work: what it computes in a step.
        computing: seconds that computing takes, which are divided by numbers of elements; None:
            estimated from `work` and the profile's rate of products of matrices.
        prefetch, overlap, network: as `Problem` has them.

    Returns:
        A plan for each chunk group.

    Raises:
        ValueError: the profile says nothing about what is used.
    """
    numel, plans = sum(group.layout.numel for group in groups), []
    for group in groups:
        layout, dtypes = group.layout, group.dtypes
        if computing is None:
            flop_per_s = rates.rate("matmul_flop_per_s", dtypes.compute)
            own = expected_computing(layout, work, flop_per_s)
        else:
            part = layout.numel / numel
            own = Computing(computing.forward_s * part, computing.backward_s * part)
        problem = Problem(
            own, work.micro_batches, layout, dtypes, rates, prefetch, overlap, network
        )
        plans.append(Plan(group, problem, CostModel(problem).cost(group.placement)))
    return plans


def whole_step(plans: Sequence[Plan]) -> StepCost:
    """The steps of all chunk groups as one, in which phases of one name are added."""
    phases: dict[str, PhaseCost] = {}
    for phase in (phase for plan in plans for phase in plan.cost.phases):
        phases[phase.name] = phases.get(phase.name, PhaseCost(phase.name)).plus(phase)
    return StepCost(tuple(phases.values()))


def figures(plans: Sequence[Plan]) -> dict[str, Any]:
    """Seconds and bytes of the whole step, for programs; phases that go on together are one."""
    step = whole_step(plans)
    return {
        "step_s": step.seconds,
        "phases_s": {phase.name: phase.seconds for phase in step.phases},
        "bound": step.bound,
        "measured_computing": not any(plan.problem.computing.expected for plan in plans),
        "nvme_read_bytes": step.traffic["nvme_read"],
        "nvme_written_bytes": step.traffic["nvme_written"],
    }
