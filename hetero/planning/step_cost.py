"""What a training step takes under a placement: seconds by phase and resource, and bytes moved.

It is a roofline: a phase takes as long as its busiest resource, which is bytes over a rate; or as
long as computing, with what computing waits for. What it knows beside:

- A gathered chunk's way is from the file, from other ranks, over the link, as far as it must. It is
  hidden behind what is computed between the use that its room is free after (`belady.py`), or the
  one PREFETCH_CHUNKS before, and its own; compute waits for the rest.
- Where buckets for gradients have run out, compute waits for the oldest one's mean.
- At one end of a phase the busiest resource waits for the computing of one chunk; when backward
  ends, all wait for the last gradient.
- The update begins when all gradients are there, and all ranks have agreed on the step. It goes
  through tiles, with a disk that reads and writes at once. Of T tiles whose optimizer state or
  parameter is in the file, B buffers save min(B, T) reads and writes of optimizer states, and reads
  of parameters. What is on DEVICE is updated there meanwhile.
- overlap_updates says whether update and backward overlap, or update and forward; with both
  all three. The order is the same in every step, so all buffers but STREAMING_BUFFERS save reads
  and writes. What backward updates, it writes with the old parameters, if these are in RAM; all
  such guesses are right.

All ranks are alike: none waits for a slower one (docs/scaling.md has those). That compute and
updates on the CPU are slower while the disk is busy is left out: it changed predictions by 2 % at
most where it was measured.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from math import ceil
from typing import Any

from hetero.overlap import STREAMING_BUFFERS, OverlapUpdates
from hetero.planning.belady import PREFETCH_CHUNKS, step_fetches
from hetero.planning.collective_cost import Network, agreement_s
from hetero.planning.group_plans import ChunkGroupPlan
from hetero.planning.placement import Placement, SlotBytes
from hetero.planning.step_problem import (
    ALL_GATHERS,
    COMPUTE,
    CPU_UPDATE,
    D2H,
    DEVICE_UPDATE,
    H2D,
    MEANS,
    NVME,
    RESOURCES,
    CollectiveCosts,
    Computing,
    Phase,
    PhaseCost,
    Problem,
    StepTransfers,
    Trace,
    Work,
    disk_rates,
    expected_trace,
    use_order,
)
from offload.memory.tiers import Tier
from offload.profile.machine_profile import Rates

TRAFFIC = ("h2d", "d2h", "nvme_read", "nvme_written", "sent")  # the last one: to other ranks


@dataclass(frozen=True)
class StepCost:
    """What one step of a rank takes, once many have been made; `traffic`: bytes by TRAFFIC."""

    phases: tuple[PhaseCost, ...]
    traffic: Counter[str]

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def busy_s(self) -> dict[str, float]:
        """Seconds by resource, of those that are used at all."""
        return {
            name: total
            for name in RESOURCES
            if (total := sum(phase.busy_s.get(name, 0.0) for phase in self.phases))
        }

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
        chunks = problem.layout.chunks
        self.slots = {chunk.id: chunk.slots for chunk in chunks}
        self.numel = {chunk.id: sum(s.param.numel for s in chunk.slices) for chunk in chunks}
        self.trained = {chunk.id for chunk in chunks if chunk.trainable}
        self._order = use_order(problem.layout)
        self._collectives = CollectiveCosts(problem)

    def cost(self, made: Placement) -> StepCost:
        """What a step takes under the placement `made`.

        Raises:
            ValueError: the profile says nothing about updates in these dtypes.
        """
        totals: dict[str, PhaseCost] = {}
        traffic: Counter[str] = Counter()
        for one, moved, times in self._passes(made):
            before = totals.get(one.name, PhaseCost(one.name, 0.0, {}))
            totals[one.name] = before.plus(one, times)
            for name, nbytes in moved.items():
                traffic[name] += times * nbytes
        phases = list(totals.values())
        update, of_update = self._update(made)
        traffic.update(of_update)
        # Forward comes first, and backward last.
        begin = 0 if self._goes_on(made) else len(phases) - 1
        end = len(phases) if self._is_early(made) else 1
        if phases and begin < end:
            others = [*phases[:begin], *phases[end:]]
            phases[begin:end] = [self._together(phases[begin:end], others, update, made)]
        else:
            phases.append(update)
        return StepCost(tuple(phases), traffic)

    def gathered(self, made: Placement) -> set[int]:
        """Ids of the chunks that compute finds in gathered slots only, under `made`."""
        shard = self.problem.layout.shard
        if shard.ranks > 1 and shard.params:
            return set(self.slots)
        here = Tier.DEVICE if self.problem.profile.separate else Tier.HOST
        return {chunk for chunk in self.slots if made.param[chunk] is not here}

    def _passes(self, made: Placement) -> Iterator[tuple[PhaseCost, Counter[str], int]]:
        """Forward and backward of the micro-batches, each with the bytes that it moves, and how
        often it comes: of many micro-batches, which are alike, three stand for all."""
        problem, trace = self.problem, self.problem.trace
        count = trace.micro_batches
        times = [1, count - 2, 1] if count > 3 else [1] * count
        gathered = self.gathered(made)
        orders = {Phase.FORWARD: self._order, Phase.BACKWARD: self._order[::-1]}
        uses = [c for _ in times for chunks in orders.values() for c in chunks if c in gathered]
        fetches = step_fetches(uses, problem.layout, made.gathered_slots)
        room_after = {fetch.use: fetch.after for fetch in fetches}
        # Seconds of computing until the uses of gathered chunks have ended; before all, and now.
        ends_s, now_s = [0.0], 0.0
        for number, weight in enumerate(times):
            for phase, chunks in orders.items():
                backward = phase is Phase.BACKWARD
                work, waited_s, last_s = StepTransfers(), 0.0, 0.0
                # Of gradients whose mean is not made: their slots, and when it will be, in seconds
                # of this pass; and when the stream of means is free.
                averaged: deque[tuple[int, float]] = deque()
                began_s, free_s = now_s, 0.0
                total_s = (trace.backward_s if backward else trace.forward_s) / count
                reading, writing = disk_rates(problem.profile, backward and Tier.DISK in made.grad)
                for chunk in chunks:
                    use = len(ends_s) - 1
                    if chunk in gathered and use in room_after:
                        way_s = self._fetch(work, made, chunk, reading)
                        uses_ahead = min(PREFETCH_CHUNKS, use - 1 - room_after[use])
                        if uses_ahead and problem.prefetch:  # as many others are on their way
                            way_s -= now_s - ends_s[use - uses_ahead]
                            way_s /= uses_ahead
                        waited_s += max(0.0, way_s)
                    if backward and chunk in self.trained:
                        room = made.bucket_slots - self.slots[chunk]
                        while averaged and sum(slots for slots, _ in averaged) > room:
                            waited_s = max(waited_s, averaged.popleft()[1] - (now_s - began_s))
                    now_s += total_s * self.numel[chunk] / problem.layout.numel
                    if chunk in gathered:
                        ends_s.append(now_s)
                    if backward and chunk in self.trained:
                        rewrites = reading if number else None
                        means_s, way_s = self._gradient(work, made, chunk, writing, rewrites)
                        last_s = means_s + way_s
                        if made.bucket_slots:
                            free_s = max(free_s, now_s - began_s + waited_s) + means_s
                            averaged.append((self.slots[chunk], free_s))
                busiest_s = max(work.busy_s.values())
                work.busy_s[COMPUTE] = total_s
                waited_s += last_s if backward and number == len(times) - 1 else 0.0
                beside_s = busiest_s and busiest_s + total_s / len(chunks)
                seconds = max(total_s + waited_s, beside_s)
                yield PhaseCost(phase.value, seconds, work.busy_s), work.nbytes, weight

    def _fetch(self, work: StepTransfers, made: Placement, chunk: int, reading: float) -> float:
        """The chunk comes into a gathered slot; returns the seconds of its way."""
        shard, profile = self.problem.layout.shard, self.problem.profile
        home, slots = made.param[chunk], self.slots[chunk]
        elsewhere = shard.ranks > 1 and shard.params
        seconds = 0.0
        if home is Tier.DISK:
            seconds += work.move(NVME, "nvme_read", slots * self.slot.param, reading)
        if elsewhere:
            seconds += work.communicate(ALL_GATHERS, self._collectives.gather(slots))
        if home is not Tier.DEVICE and profile.h2d_bytes_per_s is not None:
            shared = elsewhere and self.problem.between_devices
            nbytes = slots * (self.slot.param if shared else self.slot.gathered)
            seconds += work.move(H2D, "h2d", nbytes, profile.h2d_bytes_per_s)
        return seconds

    def _gradient(
        self,
        work: StepTransfers,
        made: Placement,
        chunk: int,
        writing: float,
        reading: float | None,
    ) -> tuple[float, float]:
        """The chunk's gradient goes home; returns seconds of its means, and of the rest of its way.

        `reading`: the disk's rate, if it is added to what is there; None: it is the first.
        """
        profile, home, slots = self.problem.profile, made.grad[chunk], self.slots[chunk]
        means = self._collectives.mean(slots) if self.problem.layout.shard.grads else []
        means_s = sum(work.communicate(MEANS, mean) for mean in means)
        seconds = 0.0
        if home is not Tier.DEVICE and profile.d2h_bytes_per_s is not None:
            nbytes = self.numel[chunk] * self.problem.dtypes.param_bytes
            if means and self.problem.between_devices:  # the mean of this rank's shard alone
                nbytes = slots * self.slot.grad
            seconds += work.move(D2H, "d2h", nbytes, profile.d2h_bytes_per_s)
        if home is Tier.DISK:
            seconds += work.move(NVME, "nvme_written", slots * self.slot.grad, writing)
            if reading is not None:
                seconds += work.move(NVME, "nvme_read", slots * self.slot.grad, reading)
        return means_s, seconds

    def _is_early(self, made: Placement) -> bool:
        """Whether updates begin during backward: of what is on NVMe."""
        return self.problem.overlap.in_backward and Tier.DISK in made.optim_state

    def _goes_on(self, made: Placement) -> bool:
        """Whether updates go on after step(): by default not if all is where compute uses it."""
        overlap = self.problem.overlap
        if overlap is OverlapUpdates.AUTO and not self.gathered(made):
            return Tier.DISK in made.optim_state
        return overlap.in_forward

    def _norm_s(self, made: Placement) -> float:
        """Seconds that the norm of gradients takes, of those that arrive in RAM otherwise than by
        a write of this rank's CPU: from a device of its own, and with stage 1 from other replicas,
        or from devices. Sums of what goes to DISK are taken on its way."""
        problem, shard = self.problem, self.problem.layout.shard
        arrives = not shard.grads and (shard.replicas > 1 or problem.between_devices)
        if shard.ranks * shard.replicas == 1:
            arrives = problem.profile.separate
        if not (problem.grad_factors and arrives):
            return 0.0
        kept = sum(self.numel[c] for c in self.trained if made.grad[c] is Tier.HOST)
        nbytes = kept * problem.dtypes.grad_bytes / (shard.ranks if shard.grads else 1)
        return nbytes / problem.profile.dram_bytes_per_s

    def _update(self, made: Placement) -> tuple[PhaseCost, Counter[str]]:
        """The update, and the bytes that it moves."""
        problem, profile, slot = self.problem, self.problem.profile, self.slot
        per_element = problem.dtypes.update_bytes / problem.layout.shard.ranks
        dtype = problem.dtypes.compute
        on_device = {c for c in self.trained if made.optim_state[c] is Tier.DEVICE}
        device_bytes = sum(self.numel[c] for c in on_device) * per_element
        host_bytes = sum(self.numel[c] for c in self.trained - on_device) * per_element
        host_s = device_s = norm_s = 0.0
        if host_bytes:
            host_s = host_bytes / profile.rate("update_bytes_per_s", dtype)
            norm_s = self._norm_s(made)
        if device_bytes:
            device_s = device_bytes / profile.rate("device_update_bytes_per_s", dtype)

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
        if self._is_early(made):
            both = zip(made.optim_state, made.param, strict=True)
            old = {c for c, homes in enumerate(both) if homes == (Tier.DISK, Tier.HOST)}
            written += round(sum(self.slots[c] for c in self.trained & old) * slot.param * missed)
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
            tiles = ceil(max(cached - kept, grads))
            seconds += nvme_s * read / (read + written) / max(1, tiles)
        seconds = min(seconds, alone_s + nvme_s)
        work = StepTransfers()
        total = self._communicate_at_end(work, made) + norm_s + max(seconds, device_s)
        work.nbytes.update(nvme_read=read, nvme_written=written)
        busy = {CPU_UPDATE: host_s + norm_s, NVME: nvme_s, DEVICE_UPDATE: device_s}
        return PhaseCost("update", total, {**work.busy_s, **busy}), work.nbytes

    def _kept(self, made: Placement) -> tuple[int, int]:
        """Tiles whose updates take a buffer, and how many of them stay there for the next step."""
        cached = sum(
            self.slots[c]
            for c in self.trained
            if made.optim_state[c] is Tier.DISK or made.param[c] is Tier.DISK
        )
        lacking = max(0, cached - made.buffers)
        if self.problem.overlap.repeats:
            lacking = min(cached, lacking + min(STREAMING_BUFFERS, lacking))
        return cached, cached - lacking

    def _together(
        self,
        phases: Sequence[PhaseCost],
        others: Sequence[PhaseCost],
        update: PhaseCost,
        made: Placement,
    ) -> PhaseCost:
        """Phases and the updates that go on in them: the busiest resource of all says how long.

        If the CPU computes, its updates take its time. Those of one chunk go on alone: the one that
        backward comes to last, and forward first; it is the first that buffers keep. If there is a
        choice, gradients that have a home in RAM are those that wait for forward, the others hold
        slots that backward needs. What the `others` leave to them, of several micro-batches, keeps
        its resource busy, too.
        """
        busy = reduce(PhaseCost.plus, [*phases, update]).busy_s
        other = reduce(PhaseCost.plus, others, PhaseCost("", 0.0, {}))
        left = {n: max(0.0, other.busy_s.get(n, 0.0) - other.seconds) for n in RESOURCES}
        together = 0.0 if self.problem.profile.separate else busy[COMPUTE] + busy[CPU_UPDATE]
        busiest_s = max(together, *(busy[name] + left[name] for name in RESOURCES))
        phases_s = sum(each.seconds for each in phases) + self._first_alone_s(update, made)
        if len(phases) > 1:
            early = sum(self.slots[c] for c in self.trained if made.grad[c] is Tier.DISK)
            share = early / max(1, sum(self.slots[c] for c in self.trained))
            phases_s += max(0.0, share * update.seconds - phases[-1].seconds)
        seconds = max(phases_s, update.seconds, busiest_s)
        *names, last = [each.name for each in (*phases, update)]
        return PhaseCost(f"{', '.join(names)} and {last}", seconds, busy)

    def _first_alone_s(self, update: PhaseCost, made: Placement) -> float:
        """The updates of the chunk that forward needs first."""
        first = next((c for c in self._order if c in self.trained), None)
        if first is None:
            return 0.0
        slot, optim_state, param = self.slot, made.optim_state[first], made.param[first]
        in_buffers = slot.optim_state if optim_state is Tier.DISK else 0
        in_buffers += slot.param if param is Tier.DISK else 0
        missed = max(0, self.slots[first] - self._kept(made)[1]) if in_buffers else 0
        written = missed * slot.optim_state if optim_state is Tier.DISK else 0
        written += self.slots[first] * slot.param if param is Tier.DISK else 0
        nvme_s = _nvme_seconds(self.problem.profile, missed * in_buffers, written)
        if optim_state is Tier.DEVICE:
            return nvme_s
        on_cpu = sum(self.numel[c] for c in self.trained if made.optim_state[c] is not Tier.DEVICE)
        return max(nvme_s, update.busy_s[CPU_UPDATE] * self.numel[first] / on_cpu)

    def _communicate_at_end(self, work: StepTransfers, made: Placement) -> float:
        """What ranks do around the update; returns its seconds.

        They agree on the step, and average gradients (stage 1) and gather parameters (stages 1 and
        2) that they have whole. Between devices what is at home in RAM crosses the link for that.
        """
        problem, shard, profile = self.problem, self.problem.layout.shard, self.problem.profile
        total_s = 0.0 if problem.network is None else agreement_s(problem.network)
        for chunk in self.trained:
            slots, up, down = self.slots[chunk], 0, 0
            means = [] if shard.grads else self._collectives.mean(slots)
            total_s += sum(work.communicate(MEANS, mean) for mean in means)
            if means and made.grad[chunk] is not Tier.DEVICE:
                up, down = slots * self.slot.bucket, slots * self.slot.bucket // shard.ranks
            if shard.ranks > 1 and not shard.params:
                total_s += work.communicate(ALL_GATHERS, self._collectives.gather(slots))
                if made.param[chunk] is not Tier.DEVICE:
                    whole = slots * self.slot.gathered
                    up += whole // shard.ranks
                    down += whole - whole // shard.ranks
            if problem.between_devices and profile.h2d_bytes_per_s and profile.d2h_bytes_per_s:
                total_s += work.move(H2D, "h2d", up, profile.h2d_bytes_per_s)
                total_s += work.move(D2H, "d2h", down, profile.d2h_bytes_per_s)
        return total_s


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
    grad_factors: bool = False,
    network: Network | None = None,
    network_bytes_per_s: float | None = None,
) -> list[Plan]:
    """What a step of chunk groups takes on one rank.

    Args:
        groups: all of a model.
        rates: the rank's share of its machine; a Profile where `computing` is None.
        work: what it computes in a step.
        computing: seconds that computing takes, which are divided by numbers of elements; None:
            estimated from `work` and the profile's rate of products of matrices.
        prefetch, overlap, grad_factors, network: as `Problem` has them.
        network_bytes_per_s: what a rank sends to any others, where no more is known of a network.

    Returns:
        A plan for each chunk group.

    Raises:
        ValueError: the profile says nothing about what is used.
    """
    numel = sum(group.layout.numel for group in groups)
    plans = []
    for group in groups:
        layout, dtypes = group.layout, group.dtypes
        ranks = layout.shard.ranks * layout.shard.replicas
        if network is None and network_bytes_per_s is not None:
            network = Network.flat(ranks, network_bytes_per_s)
        if computing is None:
            flop_per_s = rates.rate("matmul_flop_per_s", dtypes.compute)
            trace = expected_trace(layout, work, flop_per_s)
        else:
            part = layout.numel / numel
            seconds = computing.forward_s * part, computing.backward_s * part
            trace = Trace(*seconds, work.micro_batches)
        problem = Problem(
            trace=trace,
            layout=layout,
            dtypes=dtypes,
            profile=rates,
            prefetch=prefetch,
            overlap=overlap,
            grad_factors=grad_factors,
            network=network,
        )
        cost = CostModel(problem).cost(group.placement)
        moved = cost.traffic["nvme_read"] + cost.traffic["nvme_written"]
        if moved and rates.nvme_read_bytes_per_s is None:
            raise ValueError(
                f"the profile {rates.name!r} says nothing about NVMe; measure it again"
            )
        plans.append(Plan(group, problem, cost))
    return plans


def whole_step(plans: Sequence[Plan]) -> StepCost:
    """The steps of all chunk groups as one, in which phases of one name are added."""
    phases: dict[str, PhaseCost] = {}
    traffic: Counter[str] = Counter()
    for plan in plans:
        traffic.update(plan.cost.traffic)
        for phase in plan.cost.phases:
            phases[phase.name] = phases[phase.name].plus(phase) if phase.name in phases else phase
    return StepCost(tuple(phases.values()), traffic)


def figures(plans: Sequence[Plan]) -> dict[str, Any]:
    """Seconds and bytes of the whole step, for programs; phases that go on together are one."""
    step = whole_step(plans)
    return {
        "step_s": step.seconds,
        "phases_s": {phase.name: phase.seconds for phase in step.phases},
        "bound": step.bound,
        "measured_computing": not any(plan.problem.trace.expected for plan in plans),
        "nvme_read_bytes": step.traffic["nvme_read"],
        "nvme_written_bytes": step.traffic["nvme_written"],
    }
