"""What a training step takes under a placement: seconds by phase and resource, and bytes moved.

A step is forward and backward of each micro-batch, then the update. Compute, the two directions of
the link, disk and network work at once, each of them on one transfer after the other; a timeline of
uses says when one waits for another. What the timeline knows:

- A gathered chunk is fetched when a use begins, its room is free (`belady.py`) and it is among the
  next PREFETCH_CHUNKS; from the file, from other ranks, then over the link, as far as it must.
- A gradient leaves after its chunk's use in a backward: over the link, to other ranks, to the
  file. The update begins when all are there.
- The update goes through tiles, with a disk that reads and writes at once. Of T tiles whose
  optimizer state or parameter is in the file, B buffers save min(B, T) reads and writes of
  optimizer states, and reads of parameters. What is on DEVICE is updated there meanwhile.
- overlap_updates says whether update and backward overlap, or update and forward; with both
  all three. The order is the same in every step, so all buffers but STREAMING_BUFFERS save reads
  and writes. What backward updates, it writes with the old parameters, if these are in RAM; all
  such guesses are right.
- That compute and updates on the CPU are slower while the disk is busy is left out: it changed
  predictions by 2 % at most where it was measured.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import ceil

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Layout
from hetero.overlap import STREAMING_BUFFERS, OverlapUpdates
from hetero.planning.belady import PREFETCH_CHUNKS, PlannedFetch, fetches
from hetero.planning.placement import Placement, SlotBytes
from hetero.planning.trace import Phase, Trace, use_order
from offload.memory.tiers import Tier
from offload.profile.machine_profile import Rates

COMPUTE, H2D, D2H, NVME, NETWORK = "compute", "link to device", "link to RAM", "NVMe", "network"
CPU_UPDATE, DEVICE_UPDATE = "update in RAM", "update on device"
RESOURCES = (COMPUTE, H2D, D2H, NVME, NETWORK, CPU_UPDATE, DEVICE_UPDATE)
TRAFFIC = ("h2d", "d2h", "nvme_read", "nvme_written", "sent")  # the last one: to other ranks


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
    network_bytes_per_s: float | None = None  # to other ranks; None: not known, and not counted
    undoable_steps: bool = False  # what updates change is kept on NVMe until the next step


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


@dataclass(frozen=True)
class _Segment:
    """Forward or backward of a micro-batch, which comes `weight` times in a step."""

    phase: Phase
    weight: int
    chunks: list[int]  # in the order of their uses
    first: bool  # of the step's micro-batches
    element_s: float  # of computing, per element


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
        self.frozen = frozenset(self.slots) - self.trained
        self.segments = _segments(problem.layout, problem.trace)

    def cost(self, made: Placement) -> StepCost:
        """What a step takes under the placement `made`.

        Raises:
            ValueError: the profile says nothing about updates in these dtypes.
        """
        totals: dict[str, PhaseCost] = {}
        traffic: Counter[str] = Counter()
        for segment, (one, moved) in zip(self.segments, _Timeline(self, made).walk(), strict=True):
            if segment.weight > 1:  # of several in a row none can leave work to what comes after
                one = replace(one, seconds=max(one.seconds, *one.busy_s.values()))
            before = totals.get(one.name, PhaseCost(one.name, 0.0, {}))
            totals[one.name] = before.plus(one, segment.weight)
            for name, nbytes in moved.items():
                traffic[name] += segment.weight * nbytes
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

    def _is_early(self, made: Placement) -> bool:
        """Whether updates begin during backward: of what is on NVMe."""
        return self.problem.overlap.in_backward and Tier.DISK in made.optim_state

    def _goes_on(self, made: Placement) -> bool:
        """Whether updates go on after step(): by default not if all is where compute uses it."""
        overlap = self.problem.overlap
        if overlap is OverlapUpdates.AUTO and not self.gathered(made):
            return Tier.DISK in made.optim_state
        return overlap.in_forward

    def _norm_takes_a_pass(self) -> bool:
        """Whether gradients arrive in RAM otherwise than by a write of this rank's CPU.

        They do from a device of its own, and with stage 1 from other replicas.
        """
        shard = self.problem.layout.shard
        if shard.ranks * shard.replicas == 1:
            return self.problem.profile.separate
        return not shard.grads and shard.replicas > 1

    def _update(self, made: Placement) -> tuple[PhaseCost, dict[str, int]]:
        """The update, and the bytes that it moves."""
        problem, profile, slot = self.problem, self.problem.profile, self.slot
        shard, update_bytes = problem.layout.shard, problem.dtypes.update_bytes
        dtype = problem.dtypes.compute
        on_device = {c for c in self.trained if made.optim_state[c] is Tier.DEVICE}
        ranks = shard.ranks
        device_bytes = sum(self.numel[c] for c in on_device) * update_bytes / ranks
        host_numel = sum(self.numel[c] for c in self.trained - on_device)
        host_s = host_numel * update_bytes / ranks
        norm_s = 0.0
        if host_s:
            host_s /= profile.rate("update_bytes_per_s", dtype)
            if problem.grad_factors and self._norm_takes_a_pass():
                # Sums of what goes to DISK are taken on its way.
                kept = sum(self.numel[c] for c in self.trained if made.grad[c] is Tier.HOST)
                norm_s = kept * problem.dtypes.grad_bytes / profile.dram_bytes_per_s
                norm_s /= ranks if shard.grads else 1
        device_s = 0.0
        if device_bytes:
            device_s = device_bytes / profile.rate("device_update_bytes_per_s", dtype)

        def slots(homes: Sequence[Tier | None]) -> int:
            return sum(self.slots[c] for c in self.trained if homes[c] is Tier.DISK)

        optim_states, params, grads = slots(made.optim_state), slots(made.param), slots(made.grad)
        cached, kept = self._kept(made)
        missed = (cached - kept) / cached if cached else 0.0
        if problem.overlap is OverlapUpdates.BACKWARD:
            grads = 0  # gradients are used where they arrive
        read = (
            round((optim_states * slot.optim_state + params * slot.param) * missed)
            + grads * slot.grad
        )
        written = round(optim_states * slot.optim_state * missed) + params * slot.param
        if problem.undoable_steps:  # new state of what is on NVMe, old state of what is in RAM
            written = sum(self.slots[c] for c in self.trained - on_device)
            written *= slot.optim_state + slot.param
        elif self._is_early(made):
            old_params = sum(
                self.slots[c]
                for c in self.trained
                if made.optim_state[c] is Tier.DISK and made.param[c] is Tier.HOST
            )
            written += round(old_params * slot.param * missed)
        nvme_s = _nvme_seconds(profile, read, written)
        seconds = max(host_s, nvme_s)
        # Beside forward and backward the CPU takes twice as long, which few buffers do not hide.
        alone_s = 2 * host_s if problem.overlap.repeats else host_s
        if made.buffers == 1 or (problem.undoable_steps and not made.buffers):
            seconds = alone_s + nvme_s
        elif made.buffers == 2:
            seconds += min(alone_s, nvme_s) / 2
        if read:
            # At the ends one waits for the other: for the first gradient, or the first free buffer,
            # and for the last read.
            tiles = ceil(max(cached - kept, grads))
            seconds += nvme_s * read / (read + written) / max(1, tiles)
        seconds = min(seconds, alone_s + nvme_s)
        sent, network_s = self._averaged_at_end()
        busy = {
            CPU_UPDATE: host_s + norm_s,
            NVME: nvme_s,
            DEVICE_UPDATE: device_s,
            NETWORK: network_s,
        }
        total = network_s + norm_s + max(seconds, device_s)
        return (
            PhaseCost("update", total, busy),
            {"nvme_read": read, "nvme_written": written, "sent": sent},
        )

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
        alone_s = self._first_alone_s(update, made)
        phases_s = sum(each.seconds for each in phases)
        if len(phases) > 1:
            waiting = sum(self.slots[c] for c in self.trained if made.grad[c] is not Tier.DISK)
            share = waiting / max(1, sum(self.slots[c] for c in self.trained))
            phases_s += max(0.0, (1 - share) * update.seconds - phases[-1].seconds)
        seconds = max(phases_s + alone_s, update.seconds, busiest_s)
        *names, last = [each.name for each in (*phases, update)]
        return PhaseCost(f"{', '.join(names)} and {last}", seconds, busy)

    def _first_alone_s(self, update: PhaseCost, made: Placement) -> float:
        """The updates of the chunk that forward needs first."""
        first = next((c for c in use_order(self.problem.layout) if c in self.trained), None)
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

    def _averaged_at_end(self) -> tuple[int, float]:
        """Bytes and seconds of what ranks send around the update: stages 1 and 2, and replicas."""
        problem, slot = self.problem, self.slot
        shard = problem.layout.shard
        trained = sum(self.slots[c] for c in self.trained)
        nbytes = 0.0
        if shard.ranks > 1:
            others = (shard.ranks - 1) / shard.ranks
            nbytes += 0 if shard.grads else trained * slot.bucket * others
            nbytes += 0 if shard.params else trained * slot.gathered * others
        if shard.replicas > 1:
            nbytes += 2 * trained * slot.bucket / shard.ranks * (1 - 1 / shard.replicas)
        rate = problem.network_bytes_per_s
        return round(nbytes), nbytes / rate if rate else 0.0


class _Timeline:
    """One step, use by use: when each resource is free, and what each segment has made it do."""

    def __init__(self, model: CostModel, made: Placement) -> None:
        self._model = model
        self._made = made
        self._problem = model.problem
        self._profile = model.problem.profile
        self._slot = model.slot
        shard = model.problem.layout.shard
        several = shard.ranks * shard.replicas > 1
        self._net = model.problem.network_bytes_per_s if several else None
        self._others = (shard.ranks - 1) / shard.ranks
        self._now_s = 0.0  # of compute
        self._free_s = dict.fromkeys((NVME, H2D, D2H, NETWORK), 0.0)
        self._busy_s: dict[str, float] = {}
        self._nbytes: Counter[str] = Counter()

    def walk(self) -> Iterator[tuple[PhaseCost, Counter[str]]]:
        """For each segment its seconds since the one before, and the bytes that it moved."""
        model, made = self._model, self._made
        gathered = model.gathered(made)
        uses = [c for segment in model.segments for c in segment.chunks if c in gathered]
        coming: deque[PlannedFetch] = deque()
        if uses:
            coming.extend(fetches(uses, model.slots, made.gathered_slots, model.frozen))
        ready_s: dict[int, float] = {}
        use = 0  # number of the next one of a gathered chunk
        for segment in model.segments:
            began_s = self._now_s
            self._busy_s, self._nbytes = dict.fromkeys(RESOURCES, 0.0), Counter()
            backward = segment.phase is Phase.BACKWARD
            self._rates = _disk_rates(self._profile, backward and Tier.DISK in made.grad)
            for chunk in segment.chunks:
                if chunk in gathered:
                    if coming and coming[0].use == use:
                        coming.popleft()
                        ready_s[use] = self._fetch(chunk)
                    self._now_s = max(self._now_s, ready_s.pop(use, 0.0))
                    # What comes next, as far as its room is free: nearest first.
                    while coming and self._is_ahead(coming[0], use):
                        fetch = coming.popleft()
                        ready_s[fetch.use] = self._fetch(uses[fetch.use])
                    use += 1
                computing_s = model.numel[chunk] * segment.element_s
                self._now_s += computing_s
                self._busy_s[COMPUTE] += computing_s
                if backward and chunk in model.trained:
                    self._gradient(chunk, segment.first)
            if segment is model.segments[-1]:
                self._now_s = max(self._now_s, *self._free_s.values())
            yield PhaseCost(segment.phase.value, self._now_s - began_s, self._busy_s), self._nbytes

    def _is_ahead(self, fetch: PlannedFetch, use: int) -> bool:
        near = fetch.use <= use + PREFETCH_CHUNKS
        return self._problem.prefetch and near and fetch.after < use

    def _fetch(self, chunk: int) -> float:
        """Begins now; returns when the chunk is in its slot."""
        profile, shard = self._profile, self._problem.layout.shard
        home = self._made.param[chunk]
        slots = self._model.slots[chunk]
        whole = slots * self._slot.gathered
        ready_s = self._now_s
        if home is Tier.DISK:
            nbytes = slots * self._slot.param
            self._nbytes["nvme_read"] += nbytes
            ready_s = self._move(NVME, nbytes / self._rates[0], ready_s)
        if shard.ranks > 1 and shard.params:
            ready_s = self._send(whole * self._others, ready_s)
        if home is not Tier.DEVICE and profile.h2d_bytes_per_s is not None:
            self._nbytes["h2d"] += whole
            ready_s = self._move(H2D, whole / profile.h2d_bytes_per_s, ready_s)
        return ready_s

    def _gradient(self, chunk: int, first: bool) -> None:
        """The chunk's gradient leaves; it is the `first` of the step, or added to those."""
        profile, shard = self._profile, self._problem.layout.shard
        slots = self._model.slots[chunk]
        ready_s = self._now_s
        home = self._made.grad[chunk]
        if home is not Tier.DEVICE and profile.d2h_bytes_per_s is not None:
            nbytes = self._model.numel[chunk] * self._problem.dtypes.param_bytes
            self._nbytes["d2h"] += nbytes
            ready_s = self._move(D2H, nbytes / profile.d2h_bytes_per_s, ready_s)
        if shard.ranks > 1 and shard.grads:
            ready_s = self._send(slots * self._slot.bucket * self._others, ready_s)
        if home is Tier.DISK:
            nbytes = slots * self._slot.grad
            reading, writing = self._rates
            self._nbytes["nvme_written"] += nbytes
            seconds = nbytes / writing
            if not first:
                self._nbytes["nvme_read"] += nbytes
                seconds += nbytes / reading
            self._move(NVME, seconds, ready_s)

    def _send(self, nbytes: float, ready_s: float) -> float:
        self._nbytes["sent"] += round(nbytes)
        return self._move(NETWORK, nbytes / self._net, ready_s) if self._net else ready_s

    def _move(self, resource: str, seconds: float, ready_s: float) -> float:
        """Keeps the resource busy from when it is free and all is `ready_s`; returns the end."""
        self._free_s[resource] = max(self._free_s[resource], ready_s) + seconds
        self._busy_s[resource] += seconds
        return self._free_s[resource]


def _disk_rates(profile: Rates, both: bool) -> tuple[float, float]:
    """Of reads and of writes; without a disk nothing is ever divided by them."""
    if both and profile.nvme_mixed_bytes_per_s:
        return profile.nvme_mixed_bytes_per_s, profile.nvme_mixed_bytes_per_s
    return profile.nvme_read_bytes_per_s or 1.0, profile.nvme_write_bytes_per_s or 1.0


def _nvme_seconds(profile: Rates, read: int, written: int) -> float:
    """As much of both as there is goes at the mixed rate, the rest alone."""
    if not read + written:
        return 0.0
    reading, writing = _disk_rates(profile, False)
    mixed, _ = _disk_rates(profile, True)
    both = min(read, written)
    return 2 * both / mixed + (read - both) / reading + (written - both) / writing


def _segments(layout: Layout, trace: Trace) -> list[_Segment]:
    """Of many micro-batches, which are alike, three stand for all."""
    count, order = trace.micro_batches, use_order(layout)
    numel = layout.numel * max(1, count)
    made: list[_Segment] = []
    for number, weight in enumerate([1, count - 2, 1] if count > 3 else [1] * count):
        first = number == 0
        made += [
            _Segment(Phase.FORWARD, weight, order, first, trace.forward_s / numel),
            _Segment(Phase.BACKWARD, weight, order[::-1], first, trace.backward_s / numel),
        ]
    return made
