"""What a training step takes under a placement: bytes moved, and seconds by phase and resource.

It is a roofline. Compute, the two directions of the link, the disk, the network and updates are
resources that work at once, each on one thing after the other: bytes over a rate, and latencies of
messages. A phase takes as long as its busiest resource, or as compute and what nothing hides:

- A gathered chunk's way is from the file, from other ranks, over the link, as far as it must. It is
  waited for if its room is free only when the use before it is over (`belady.py`), as it is with
  the first of a step, and always without prefetch.
- Where buckets for gradients have room for one chunk alone, compute waits for each mean; when
  backward ends, for the last gradient. The busiest resource waits for the computing of one chunk.
- The update begins when all gradients are there, and all ranks have agreed on the step. It goes
  through tiles, with a disk that reads and writes at once. Of T tiles whose optimizer state or
  parameter is in the file, B buffers save min(B, T) reads and writes of optimizer states, and reads
  of parameters. One buffer hides nothing, two hide half.
- overlap_updates says which phases and the update are one. The order is the same in every step
  then, so all buffers but STREAMING_BUFFERS save reads and writes. What backward updates, it writes
  with the old parameters, if these are in RAM; all such guesses are right.

Bytes are exact. All ranks are alike: none waits for a slower one (docs/scaling.md has those).
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

from hetero.chunks.layout import Chunk, Layout
from hetero.overlap import STREAMING_BUFFERS, OverlapUpdates
from hetero.planning.belady import step_fetches
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
# By the number of buffers, the share of an update's shorter part that the longer does not hide.
_EXPOSED = {1: 1.0, 2: 0.5}


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


@dataclass
class PhaseCost:
    """Seconds that a phase takes, for which each resource is busy, and bytes by TRAFFIC."""

    name: str
    seconds: float = 0.0
    busy_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    traffic: Counter[str] = field(default_factory=Counter)

    def plus(self, other: PhaseCost) -> PhaseCost:
        """Both, under this one's name."""
        made = PhaseCost(self.name, self.seconds + other.seconds, self.busy_s.copy())
        for name, seconds in other.busy_s.items():
            made.busy_s[name] += seconds
        made.traffic = self.traffic + other.traffic
        return made

    def communicate(self, stream: str, costs: Sequence[CollectiveCost]) -> float:
        """Adds collectives of a stream, one after the other, and returns their seconds."""
        for cost in costs:
            self.traffic["sent"] += round(cost.bytes_sent)
            self.busy_s[NETWORK if cost.crosses_nodes else NODE_LINKS] += cost.transfer_s
            self.busy_s[stream] += cost.seconds
        return sum(cost.seconds for cost in costs)


# What step figures are called in JSON.
STEP_FIGURES = ("step_s", "bound", "nvme_read_bytes", "nvme_written_bytes")


@dataclass(frozen=True)
class StepCost:
    """What one step of a rank takes, once many have been made."""

    phases: tuple[PhaseCost, ...]

    @cached_property
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

    @property
    def figures(self) -> dict[str, Any]:
        """STEP_FIGURES, for programs."""
        moved = self.traffic["nvme_read"], self.traffic["nvme_written"]
        return dict(zip(STEP_FIGURES, (self.seconds, self.bound, *moved), strict=True))


@dataclass(frozen=True)
class Plan:
    """A chunk group as it is placed, and the step that it is predicted to take.

    Chunks are used in the order of registration, in backward in the reverse.
    """

    group: ChunkGroupPlan
    computing: Computing
    micro_batches: int
    profile: Rates  # of one rank's share of its machine
    prefetch: bool = True  # parameters are fetched ahead of their use
    overlap: OverlapUpdates = OverlapUpdates.NONE  # what updates overlap with
    network: Network | None = None  # of all ranks; None: not known, and its time not counted

    @cached_property
    def cost(self) -> StepCost:
        """What a step takes; raises as cost_of()."""
        return self.cost_of(self.group.placement)

    def cost_of(self, made: Placement) -> StepCost:
        """What a step would take under the placement `made`.

        Raises:
            ValueError: the profile says nothing about updates in these dtypes, or about a disk.
        """
        uses_disk = Tier.DISK in (*made.param, *made.grad, *made.optim_state)
        if uses_disk and self.profile.nvme_read_bytes_per_s is None:
            raise ValueError(
                f"the profile {self.profile.name!r} says nothing about NVMe; measure it again"
            )
        phases, update = self._computing_phases(made), self._update(made)
        # Updates of what is on NVMe may begin in backward; and go on after step(), by default not
        # if all is where compute uses it. Forward comes first, and backward last.
        late = self.overlap.in_forward
        if self.overlap is OverlapUpdates.AUTO and not self._gathered(made):
            late = Tier.DISK in made.optim_state
        early = self.overlap.in_backward and Tier.DISK in made.optim_state
        begin, end = 0 if late else len(phases) - 1, len(phases) if early else 1
        if phases and begin < end:
            phases[begin:end] = [self._together(phases[begin:end], update)]
        else:
            phases.append(update)
        return StepCost(tuple(phases))

    @property
    def layout(self) -> Layout:
        """How the parameters are packed into chunks."""
        return self.group.layout

    @cached_property
    def _slot(self) -> SlotBytes:
        return self.group.spec.slot

    @cached_property
    def order(self) -> list[int]:
        """Ids of chunks as forward uses them."""
        first = {c.id: min(s.param.index for s in c.slices) for c in self.layout.chunks}
        return sorted(first, key=first.__getitem__)

    @cached_property
    def _trained(self) -> list[Chunk]:
        return [chunk for chunk in self.layout.chunks if chunk.trainable]

    def _slots(self, homes: Sequence[Tier | None], *tiers: Tier) -> int:
        """Of trained chunks whose home is on one of `tiers`."""
        return sum(chunk.slots for chunk in self._trained if homes[chunk.id] in tiers)

    @cached_property
    def _networks(self) -> tuple[Network, Network]:
        """Of the ranks that share chunks, and of replicas; if none is known, collectives have bytes
        and no seconds."""
        shard = self.layout.shard
        network = self.network or Network(nodes=shard.ranks * shard.replicas)
        return network.groups(shard.ranks)

    @property
    def _between_devices(self) -> bool:
        """Whether the ranks' devices gather and average by themselves, and RAM does not."""
        known = self.network is not None and self.network.between_devices
        return known or self.layout.shard.between_devices

    def _gathered(self, made: Placement) -> set[int]:
        """Ids of the chunks that compute finds in gathered slots only."""
        shard = self.layout.shard
        everything = shard.ranks > 1 and shard.params
        here = Tier.DEVICE if self.profile.separate else Tier.HOST
        return {chunk for chunk in self.order if everything or made.param[chunk] is not here}

    def _move(self, work: PhaseCost, kind: str, nbytes: int, mixes: bool = False) -> float:
        """Adds bytes of TRAFFIC and returns their seconds; 0 over a link that there is not.

        `mixes`: the disk does the other thing meanwhile.
        """
        profile = self.profile
        resource, rate = {
            "h2d": (H2D, profile.h2d_bytes_per_s),
            "d2h": (D2H, profile.d2h_bytes_per_s),
            "nvme_read": (NVME, profile.nvme_read_bytes_per_s),
            "nvme_written": (NVME, profile.nvme_write_bytes_per_s),
        }[kind]
        if mixes:
            rate = profile.nvme_mixed_bytes_per_s
        if rate is None or not nbytes:
            return 0.0
        work.traffic[kind] += nbytes
        work.busy_s[resource] += nbytes / rate
        return nbytes / rate

    def _gather(self, work: PhaseCost, nbytes: int, times: int) -> float:
        """Adds all-gathers, of so many bytes in all, and returns their seconds."""
        return work.communicate(ALL_GATHERS, [self._networks[0].all_gather(nbytes, times)])

    def _average(self, work: PhaseCost, micro_batches: int) -> float:
        """Adds the means of all chunks' gradients, and returns their seconds.

        Of the ranks that share a chunk, then of the replicas, of which each sends every other its
        part, and then the part of which it made the mean.
        """
        shard, (sharing, replicas) = self.layout.shard, self._networks
        nbytes = micro_batches * sum(c.slots for c in self._trained) * self._slot.bucket
        times, mine = micro_batches * len(self._trained), nbytes / shard.ranks
        costs = [sharing.all_to_all(nbytes, times)] if shard.ranks > 1 else []
        if shard.replicas > 1:
            costs += [replicas.all_to_all(mine, times), replicas.all_gather(mine, times)]
        return work.communicate(MEANS, costs)

    def _computing_phases(self, made: Placement) -> list[PhaseCost]:
        """Forward and backward of all micro-batches; of many, which are alike, three stand for
        all."""
        count = self.micro_batches
        times = [1, count - 2, 1] if count > 3 else [1] * count
        passes = {Phase.FORWARD: self.order, Phase.BACKWARD: self.order[::-1]}
        gathered = self._gathered(made)
        uses = [
            (phase, chunk, weight)
            for weight in times
            for phase, chunks in passes.items()
            for chunk in chunks
            if chunk in gathered
        ]
        fetched: dict[Phase, Counter[int]] = {phase: Counter() for phase in passes}
        waits: Counter[Phase] = Counter()
        chunks_used = [chunk for _, chunk, _ in uses]
        for fetch in step_fetches(chunks_used, self.layout, made.gathered_slots):
            phase, chunk, weight = uses[fetch.use]
            fetched[phase][chunk] += weight
            if not self.prefetch or fetch.after == fetch.use - 1:
                waits[phase] += weight
        found = []
        for phase in passes if count else ():
            work, backward = PhaseCost(phase.value), phase is Phase.BACKWARD
            compute_s = self.computing.backward_s if backward else self.computing.forward_s
            ways_s = self._fetch(work, made, fetched[phase], backward and Tier.DISK in made.grad)
            waited_s = ways_s * waits[phase] / max(1, fetched[phase].total())
            if backward and self._trained:
                waited_s += self._gradients(work, made)
            busiest_s = max(work.busy_s.values(), default=0.0)
            busiest_s += compute_s / len(self.order) if busiest_s else 0.0
            work.busy_s[COMPUTE] = compute_s
            work.seconds = max(compute_s + waited_s, busiest_s)
            found.append(work)
        return found

    def _fetch(
        self, work: PhaseCost, made: Placement, fetched: Mapping[int, int], mixes: bool
    ) -> float:
        """Chunks come into gathered slots, each so often; returns the seconds of all ways."""
        shard, slot = self.layout.shard, self._slot
        slots: Counter[Tier] = Counter()
        for chunk, times in fetched.items():
            slots[made.param[chunk]] += times * self.layout.chunks[chunk].slots
        seconds = self._move(work, "nvme_read", slots[Tier.DISK] * slot.param, mixes)
        elsewhere = shard.ranks > 1 and shard.params
        if elsewhere:
            nbytes = sum(slots.values()) * slot.gathered
            seconds += self._gather(work, nbytes, sum(fetched.values()))
        crossing = slot.param if elsewhere and self._between_devices else slot.gathered
        return seconds + self._move(work, "h2d", (slots[Tier.HOST] + slots[Tier.DISK]) * crossing)

    def _gradients(self, work: PhaseCost, made: Placement) -> float:
        """Gradients of all micro-batches go home; returns the seconds that compute waits."""
        count, shard, slot = self.micro_batches, self.layout.shard, self._slot
        at_end = self.group.spec.reduce_at_end
        means_s = 0.0 if at_end else self._average(work, count)
        on_disk = self._slots(made.grad, Tier.DISK) * slot.grad
        if shard.ranks * shard.replicas > 1 and self._between_devices:
            down = self._slots(made.grad, Tier.HOST, Tier.DISK) * slot.grad  # means of shards alone
            down *= 1 if at_end else count
        else:
            away = [c for c in self._trained if made.grad[c.id] is not Tier.DEVICE]
            numel = sum(s.param.numel for c in away for s in c.slices)
            down = count * numel * self.group.dtypes.param_bytes
        ways_s = self._move(work, "d2h", down)
        ways_s += self._move(work, "nvme_written", count * on_disk, mixes=True)
        ways_s += self._move(work, "nvme_read", (count - 1) * on_disk, mixes=True)  # to add to
        chunks = count * len(self._trained)
        # While these are averaged there is no bucket for another.
        crowded = sum(c.slots for c in self._trained if 2 * c.slots > made.bucket_slots)
        waited_s = means_s * crowded / sum(c.slots for c in self._trained)
        return waited_s + (means_s - waited_s + ways_s) / chunks

    def _update(self, made: Placement) -> PhaseCost:
        """The update, and what ranks do around it."""
        profile, slot, dtype = self.profile, self._slot, self.group.dtypes.compute
        per_element = self.group.dtypes.update_bytes / self.layout.shard.ranks
        numel: Counter[bool] = Counter()  # by whether it is updated on DEVICE
        for chunk in self._trained:
            on_device = made.optim_state[chunk.id] is Tier.DEVICE
            numel[on_device] += sum(s.param.numel for s in chunk.slices)
        host_s = device_s = 0.0
        if numel[False]:
            host_s = numel[False] * per_element / profile.rate("update_bytes_per_s", dtype)
        if numel[True]:
            device_s = numel[True] * per_element / profile.rate("device_update_bytes_per_s", dtype)
        optim_states, params, grads = (
            self._slots(homes, Tier.DISK) for homes in (made.optim_state, made.param, made.grad)
        )
        pairs = {c.id: (made.optim_state[c.id], made.param[c.id]) for c in self._trained}
        streamed = sum(c.slots for c in self._trained if Tier.DISK in pairs[c.id])
        missed = max(0, streamed - made.buffers)  # tiles that no buffer has kept
        if self.overlap.repeats:
            missed = min(streamed, missed + min(STREAMING_BUFFERS, missed))
        share = missed / streamed if streamed else 0.0
        if self.overlap is OverlapUpdates.BACKWARD:
            grads = 0  # gradients are used where they arrive
        read = round((optim_states * slot.optim_state + params * slot.param) * share)
        read += grads * slot.grad
        written = round(optim_states * slot.optim_state * share) + params * slot.param
        if self.overlap.in_backward:
            old = (c.slots for c in self._trained if pairs[c.id] == (Tier.DISK, Tier.HOST))
            written += round(sum(old) * slot.param * share)
        work, nvme_s, both = PhaseCost("update"), 0.0, min(read, written)
        for way, nbytes in (("nvme_read", read), ("nvme_written", written)):
            nvme_s += self._move(work, way, both, mixes=True)
            nvme_s += self._move(work, way, nbytes - both)
        # Beside forward and backward the CPU takes twice as long, which few buffers do not hide.
        alone_s = 2 * host_s if self.overlap.repeats else host_s
        seconds = max(alone_s if made.buffers == 1 else host_s, nvme_s)
        seconds += _EXPOSED.get(made.buffers, 0.0) * min(alone_s, nvme_s)
        if read:
            # At the ends one waits for the other: for the first gradient, or the first free buffer,
            # and for the last read.
            seconds += nvme_s * read / (read + written) / max(1, missed, grads)
        work.busy_s[CPU_UPDATE], work.busy_s[DEVICE_UPDATE] = host_s, device_s
        work.seconds = max(min(seconds, alone_s + nvme_s), device_s)
        work.seconds += self._communicate_at_end(work, made)
        return work

    def _together(self, phases: Sequence[PhaseCost], update: PhaseCost) -> PhaseCost:
        """Phases and the updates that go on in them: the busiest resource of all says how long.

        If the CPU computes, its updates take its time. Those of the chunk that backward comes to
        last, and forward first, go on alone.
        """
        both = reduce(PhaseCost.plus, [*phases, update])
        busiest_s = max(both.busy_s.values())
        if not self.profile.separate:
            busiest_s = max(busiest_s, both.busy_s[COMPUTE] + both.busy_s[CPU_UPDATE])
        slots = {chunk.id: chunk.slots for chunk in self._trained}
        first = next((slots[chunk] for chunk in self.order if chunk in slots), 0)
        share = first / max(1, sum(slots.values()))
        alone_s = max(update.busy_s[CPU_UPDATE], update.busy_s[NVME]) * share
        alone_s += sum(each.seconds for each in phases)
        both.name = f"{', '.join(each.name for each in phases)} and {update.name}"
        both.seconds = max(alone_s, update.seconds, busiest_s)
        return both

    def _communicate_at_end(self, work: PhaseCost, made: Placement) -> float:
        """What ranks do around the update; returns its seconds.

        They agree on the step, average gradients if they do that at the end, and gather parameters
        that they have whole (stages 1 and 2). Between devices what is at home in RAM crosses the
        link for that.
        """
        shard, slot = self.layout.shard, self._slot
        total_s = 0.0 if self.network is None else self.network.agreement_s()
        if self.group.spec.reduce_at_end:
            total_s += self._average(work, 1)
        if shard.ranks > 1 and not shard.params:
            whole = sum(c.slots for c in self._trained) * slot.gathered
            total_s += self._gather(work, whole, len(self._trained))
            if self._between_devices:
                in_ram = self._slots(made.param, Tier.HOST, Tier.DISK) * slot.gathered
                up = in_ram // shard.ranks
                total_s += self._move(work, "h2d", up) + self._move(work, "d2h", in_ram - up)
        return total_s


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
        prefetch, overlap, network: as `Plan` has them.

    Returns:
        A plan for each chunk group.

    Raises:
        ValueError: the profile says nothing about what is used.
    """
    numel, plans = sum(group.layout.numel for group in groups), []
    for group in groups:
        if computing is None:
            flop_per_s = rates.rate("matmul_flop_per_s", group.dtypes.compute)
            own = expected_computing(group.layout, work, flop_per_s)
        else:
            part = group.layout.numel / numel
            own = Computing(computing.forward_s * part, computing.backward_s * part)
        plans.append(Plan(group, own, work.micro_batches, rates, prefetch, overlap, network))
        _ = plans[-1].cost  # raises here
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
        **step.figures,
        "phases_s": {phase.name: phase.seconds for phase in step.phases},
        "measured_computing": not any(plan.computing.expected for plan in plans),
    }
