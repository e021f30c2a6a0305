"""What a training step takes under a placement: seconds by phase and resource, and bytes moved.

A step is forward and backward of each micro-batch, then the update. Compute, the link's two
directions, disk and network work at once, each through its own things in order; a timeline of uses
says when one waits for another. What the timeline knows:

- A gathered chunk is fetched when its room is free (`belady.py`) and it is among the next
  PREFETCH_CHUNKS; from the file, then from other ranks, then over the link, as far as it must.
- A gradient leaves after its chunk's last use in a backward: over the link, to other ranks, to the
  file. The update begins when all are there.
- The update goes through pieces, with a disk that reads and writes at once. Of T pieces whose
  record or parameter is in the file, B buffers save min(B, T) reads and writes of records, and
  reads of parameters. What is on DEVICE is updated there meanwhile.
- Where the CPU computes, two things that go on at once slow each other down, by the profile's
  interference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from hetero.belady import Fetch, fetches
from hetero.dtypes import Dtypes
from hetero.layout import Layout
from hetero.placement import Budgets, Placement, SlotBytes
from hetero.trace import Phase, Trace, Use
from offload.profile import Profile
from offload.tiers import Tier

PREFETCH_CHUNKS = 4

COMPUTE, H2D, D2H, NVME, NETWORK = "compute", "link to device", "link to RAM", "NVMe", "network"
CPU_UPDATE, DEVICE_UPDATE = "update in RAM", "update on device"
RESOURCES = (COMPUTE, H2D, D2H, NVME, NETWORK, CPU_UPDATE, DEVICE_UPDATE)


@dataclass(frozen=True)
class Problem:
    """What a plan is made from.

    `trace` has the bank's own uses, and the seconds that they compute. `profile` is one rank's
    share of its machine, and `network_bytes_per_s` what it sends to other ranks (None: not known,
    and not counted). `min_gathered_slots` and `held` are as place() takes them. `early_updates`:
    a chunk is updated as soon as its gradient is complete, which clipping and loss scaling forbid.
    """

    trace: Trace
    layout: Layout
    dtypes: Dtypes
    budgets: Budgets
    profile: Profile
    policy: str
    min_gathered_slots: int = 1
    held: bool = False
    prefetch: bool = True
    early_updates: bool = False
    network_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Traffic:
    """Bytes that one step of one rank moves, what it sends to other ranks included."""

    h2d: int = 0
    d2h: int = 0
    nvme_read: int = 0
    nvme_written: int = 0
    sent: int = 0


@dataclass(frozen=True)
class PhaseCost:
    """Seconds that a phase takes, and for which each resource is busy in it."""

    name: str
    seconds: float
    busy_s: Mapping[str, float]


@dataclass(frozen=True)
class StepCost:
    """What one step of a rank takes, once many have been made."""

    phases: tuple[PhaseCost, ...]
    traffic: Traffic

    @property
    def seconds(self) -> float:
        """Of the whole step."""
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

    @property
    def lower_bound_s(self) -> float:
        """What the step takes at least with these bytes: as if all overlapped all."""
        return max(self.busy_s.values(), default=0.0)


@dataclass(frozen=True)
class _Segment:
    """Uses of one phase in a row, `weight` times in a step."""

    phase: Phase
    weight: int
    chunks: tuple[int, ...]
    first: bool  # of the step's micro-batches


@dataclass
class _Busy:
    """What a segment of the timeline comes to."""

    ended_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(RESOURCES, 0.0))
    nbytes: dict[str, int] = field(
        default_factory=lambda: {"h2d": 0, "d2h": 0, "nvme_read": 0, "nvme_written": 0, "sent": 0}
    )


class CostModel:
    """Predicts the steps of one problem under many placements."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._slot = SlotBytes.of(problem.layout, problem.dtypes)
        chunks = problem.layout.chunks
        self._slots = {chunk.id: chunk.slots for chunk in chunks}
        self._numel = {chunk.id: sum(s.param.numel for s in chunk.slices) for chunk in chunks}
        self._trained = {chunk.id for chunk in chunks if chunk.trainable}
        self._frozen = frozenset(self._slots) - self._trained
        self._segments = _segments(problem.trace)
        self._used = [frozenset(segment.chunks) for segment in self._segments]
        self._computing = _computing(self._segments, self._numel, problem.trace)

    def cost(self, made: Placement) -> StepCost:
        """What a step takes under `made`."""
        walked = self._walk(made)
        totals: dict[Phase, tuple[float, dict[str, float]]] = {}
        nbytes: dict[str, int] = dict.fromkeys(_Busy().nbytes, 0)
        began_s = 0.0
        for segment, busy in zip(self._segments, walked, strict=True):
            seconds = busy.ended_s - began_s
            began_s = busy.ended_s
            compute_s, nvme_s = busy.seconds[COMPUTE], busy.seconds[NVME]
            if not self.problem.profile.separate:
                together = max(0.0, compute_s + nvme_s - seconds)
                lost = self.problem.profile.compute_interference * min(together, compute_s, nvme_s)
                seconds += lost
            before_s, before = totals.get(segment.phase, (0.0, {}))
            totals[segment.phase] = (
                before_s + segment.weight * seconds,
                {
                    name: before.get(name, 0.0) + segment.weight * value
                    for name, value in busy.seconds.items()
                },
            )
            for name, moved in busy.nbytes.items():
                nbytes[name] += segment.weight * moved
        phases = [PhaseCost(phase.value, *total) for phase, total in totals.items()]
        update, moved_bytes = self._update(made)
        for name, moved in moved_bytes.items():
            nbytes[name] += moved
        if self.problem.early_updates and phases:
            phases[-1:] = [_together(phases[-1], update)]
        else:
            phases.append(update)
        return StepCost(tuple(phases), Traffic(**nbytes))

    def lower_bound_s(self, made: Placement) -> float:
        """A time that cost(made) hardly ever is below, found without a timeline."""
        problem, profile, slot = self.problem, self.problem.profile, self._slot
        gathered = self._gathered(made)
        on_disk = {c for c in gathered if made.param[c] is Tier.DISK}
        compute_s = h2d = read = drained = 0.0
        for segment, used, computing in zip(
            self._segments, self._used, self._computing, strict=True
        ):
            compute_s += segment.weight * sum(computing)
            # Uses of more than fits find at most what fits.
            for chunks, is_read in ((gathered, False), (on_disk, True)):
                slots = sum(self._slots[c] for c in used & chunks)
                missed = segment.weight * max(0, slots - made.gathered_slots)
                if is_read:
                    read += missed * slot.param
                else:
                    h2d += missed * slot.gathered
            if segment.phase is Phase.BACKWARD:
                leaving = sum(self._numel[c] for c in used & self._trained if self._drains(made, c))
                drained += segment.weight * leaving * problem.dtypes.param_bytes
        moving = [compute_s, read / _disk_rates(profile, False)[0] if read else 0.0]
        if profile.h2d_bytes_per_s and profile.d2h_bytes_per_s:
            moving += [h2d / profile.h2d_bytes_per_s, drained / profile.d2h_bytes_per_s]
        update_s = self._update(made)[0].seconds
        if problem.early_updates:
            return max(*moving, update_s)
        return max(moving) + update_s

    def _gathered(self, made: Placement) -> set[int]:
        """The chunks that compute finds in slots only."""
        shard = self.problem.layout.shard
        if shard.ranks > 1 and shard.params:
            return set(self._slots)
        here = Tier.DEVICE if self.problem.profile.separate else Tier.HOST
        return {chunk for chunk in self._slots if made.param[chunk] is not here}

    def _drains(self, made: Placement, chunk: int) -> bool:
        """Whether the chunk's gradients go over the link."""
        return self.problem.profile.separate and made.grad[chunk] is not Tier.DEVICE

    def _walk(self, made: Placement) -> list[_Busy]:
        """The timeline, segment by segment."""
        problem, profile, slot = self.problem, self.problem.profile, self._slot
        shard, dtypes = problem.layout.shard, problem.dtypes
        gathered = self._gathered(made)
        uses = [c for segment in self._segments for c in segment.chunks if c in gathered]
        missing: dict[int, Fetch] = {}
        if uses:
            found = fetches(uses, self._slots, made.gathered_slots, self._frozen)
            missing = {fetch.use: fetch for fetch in found}
        net = problem.network_bytes_per_s if shard.ranks * shard.replicas > 1 else None
        others = (shard.ranks - 1) / shard.ranks
        now = nvme = h2d = d2h = network = 0.0
        finished: list[float] = []  # of the uses of gathered chunks
        walked: list[_Busy] = []
        for number, segment in enumerate(self._segments):
            busy = _Busy()
            backward = segment.phase is Phase.BACKWARD
            last = {chunk: place for place, chunk in enumerate(segment.chunks)}
            # Reads and writes at once, where gradients go to the file.
            reading, writing = _disk_rates(profile, backward and Tier.DISK in made.grad)
            for place, chunk in enumerate(segment.chunks):
                if chunk in gathered:
                    fetch = missing.get(len(finished))
                    if fetch is not None:
                        room_s = finished[fetch.after] if fetch.after >= 0 else 0.0
                        ahead = len(finished) - PREFETCH_CHUNKS - 1
                        ahead_s = finished[ahead] if ahead >= 0 else 0.0
                        if not problem.prefetch:
                            ahead_s = now
                        # On their way shards and copies for a device have slots of their own.
                        staged = made.shard_slots > 0
                        ready_s = ahead_s if staged else max(ahead_s, room_s)
                        whole = self._slots[chunk] * slot.gathered
                        if made.param[chunk] is Tier.DISK:
                            nbytes = self._slots[chunk] * slot.param
                            nvme = max(nvme, ready_s) + nbytes / reading
                            ready_s = nvme
                            busy.seconds[NVME] += nbytes / reading
                            busy.nbytes["nvme_read"] += nbytes
                        if shard.ranks > 1 and shard.params:
                            nbytes = round(whole * others)
                            busy.nbytes["sent"] += nbytes
                            if net:
                                network = max(network, ready_s, room_s) + nbytes / net
                                ready_s = network
                                busy.seconds[NETWORK] += nbytes / net
                        if profile.separate and made.param[chunk] is not Tier.DEVICE:
                            assert profile.h2d_bytes_per_s is not None
                            h2d = max(h2d, ready_s, room_s) + whole / profile.h2d_bytes_per_s
                            ready_s = h2d
                            busy.seconds[H2D] += whole / profile.h2d_bytes_per_s
                            busy.nbytes["h2d"] += whole
                        now = max(now, ready_s)
                now += self._computing[number][place]
                busy.seconds[COMPUTE] += self._computing[number][place]
                if chunk in gathered:
                    finished.append(now)
                if not backward or chunk not in self._trained or last[chunk] != place:
                    continue
                out_s = now
                if self._drains(made, chunk):
                    assert profile.d2h_bytes_per_s is not None
                    nbytes = self._numel[chunk] * dtypes.param_bytes
                    d2h = max(d2h, out_s) + nbytes / profile.d2h_bytes_per_s
                    out_s = d2h
                    busy.seconds[D2H] += nbytes / profile.d2h_bytes_per_s
                    busy.nbytes["d2h"] += nbytes
                if shard.ranks > 1 and shard.grads:
                    nbytes = round(self._slots[chunk] * slot.bucket * others)
                    busy.nbytes["sent"] += nbytes
                    if net:
                        network = max(network, out_s) + nbytes / net
                        out_s = network
                        busy.seconds[NETWORK] += nbytes / net
                if made.grad[chunk] is Tier.DISK:
                    nbytes = self._slots[chunk] * slot.grad
                    busy.nbytes["nvme_written"] += nbytes
                    seconds = nbytes / writing
                    if not segment.first:  # it is added to what is there
                        busy.nbytes["nvme_read"] += nbytes
                        seconds += nbytes / reading
                    nvme = max(nvme, out_s) + seconds
                    busy.seconds[NVME] += seconds
            if number == len(self._segments) - 1:
                now = max(now, nvme, d2h, network)
            busy.ended_s = now
            walked.append(busy)
        return walked

    def _update(self, made: Placement) -> tuple[PhaseCost, dict[str, int]]:
        """The update, and the bytes that it moves."""
        problem, profile, slot = self.problem, self.problem.profile, self._slot
        shard, kind = problem.layout.shard, problem.dtypes.kind
        dtype = problem.dtypes.compute
        on_device = {c for c in self._trained if made.record[c] is Tier.DEVICE}
        ranks = shard.ranks
        device_bytes = sum(self._numel[c] for c in on_device) * kind.bytes_moved / ranks
        host_numel = sum(self._numel[c] for c in self._trained - on_device)
        host_s = host_numel * kind.bytes_moved / ranks
        if host_s:
            host_s /= profile.rate("update_bytes_per_s", dtype)
        device_s = 0.0
        if device_bytes:
            device_s = device_bytes / profile.rate("device_update_bytes_per_s", dtype)

        def slots(homes: Sequence[Tier | None]) -> int:
            return sum(self._slots[c] for c in self._trained if homes[c] is Tier.DISK)

        records, params, grads = slots(made.record), slots(made.param), slots(made.grad)
        cached = sum(
            self._slots[c]
            for c in self._trained
            if made.record[c] is Tier.DISK or made.param[c] is Tier.DISK
        )
        missed = max(0, cached - made.buffers) / cached if cached else 0.0
        read = round((records * slot.record + params * slot.param) * missed) + grads * slot.grad
        written = round(records * slot.record * missed) + params * slot.param
        nvme_s = _nvme_seconds(profile, read, written)
        seconds = max(host_s, nvme_s)
        if made.buffers == 1:
            seconds = host_s + nvme_s
        elif made.buffers == 2:
            seconds += min(host_s, nvme_s) / 2
        if read:
            # Before the first update there is nothing to overlap its read with.
            pieces = ceil(max(cached * missed, grads))
            seconds += nvme_s * read / (read + written) / max(1, pieces)
        seconds = min(seconds, host_s + nvme_s)
        together = max(0.0, host_s + nvme_s - seconds)
        seconds += profile.update_interference * min(together, host_s, nvme_s)
        sent, network_s = self._averaged_at_end()
        busy = {CPU_UPDATE: host_s, NVME: nvme_s, DEVICE_UPDATE: device_s, NETWORK: network_s}
        total = network_s + max(seconds, device_s)
        return (
            PhaseCost("update", total, busy),
            {"nvme_read": read, "nvme_written": written, "sent": sent},
        )

    def _averaged_at_end(self) -> tuple[int, float]:
        """Bytes and seconds of what ranks send around the update: stages 1 and 2, and replicas."""
        problem, slot = self.problem, self._slot
        shard = problem.layout.shard
        trained = sum(self._slots[c] for c in self._trained)
        nbytes = 0.0
        if shard.ranks > 1:
            others = (shard.ranks - 1) / shard.ranks
            nbytes += 0 if shard.grads else trained * slot.bucket * others
            nbytes += 0 if shard.params else trained * slot.gathered * others
        if shard.replicas > 1:
            nbytes += 2 * trained * slot.bucket / shard.ranks * (1 - 1 / shard.replicas)
        rate = problem.network_bytes_per_s
        return round(nbytes), nbytes / rate if rate else 0.0


def _disk_rates(profile: Profile, both: bool) -> tuple[float, float]:
    """Of reads and of writes; without a disk nothing is ever divided by them."""
    if both and profile.nvme_mixed_bytes_per_s:
        return profile.nvme_mixed_bytes_per_s, profile.nvme_mixed_bytes_per_s
    return profile.nvme_read_bytes_per_s or 1.0, profile.nvme_write_bytes_per_s or 1.0


def _nvme_seconds(profile: Profile, read: int, written: int) -> float:
    """As much of both as there is goes at the mixed rate, the rest alone."""
    if not read + written:
        return 0.0
    reading, writing = _disk_rates(profile, False)
    mixed, _ = _disk_rates(profile, True)
    both = min(read, written)
    return 2 * both / mixed + (read - both) / reading + (written - both) / writing


def _together(backward: PhaseCost, update: PhaseCost) -> PhaseCost:
    """Backward and the updates that begin in it: the busiest resource of both says how long."""
    busy = {
        name: backward.busy_s.get(name, 0.0) + update.busy_s.get(name, 0.0) for name in RESOURCES
    }
    seconds = max(backward.seconds, update.seconds, *busy.values())
    return PhaseCost("backward and update", seconds, busy)


def _segments(trace: Trace) -> list[_Segment]:
    """Runs of uses of one phase. Of many micro-batches that are alike three stand for all."""
    runs: list[list[Use]] = []
    for use in trace.uses:
        if not runs or runs[-1][0].phase is not use.phase:
            runs.append([])
        runs[-1].append(use)
    count = trace.micro_batches
    per_batch = len(runs) // max(1, count)
    weights = [1] * len(runs)
    if count > 3 and per_batch and len(runs) == per_batch * count:
        batches = [runs[i : i + per_batch] for i in range(0, len(runs), per_batch)]
        if all(batch == batches[0] for batch in batches):
            runs = batches[0] * 3
            weights = [1] * per_batch + [count - 2] * per_batch + [1] * per_batch
    made: list[_Segment] = []
    backwards = 0
    for run, weight in zip(runs, weights, strict=True):
        phase = run[0].phase
        chunks = tuple(use.chunk for use in run)
        made.append(_Segment(phase, weight, chunks, phase is Phase.BACKWARD and not backwards))
        backwards += phase is Phase.BACKWARD
    return made


def _computing(
    segments: Sequence[_Segment], numel: Mapping[int, int], trace: Trace
) -> list[list[float]]:
    """Seconds of each use: a phase's, by the elements that are used."""
    per_element: dict[Phase, float] = {}
    for phase, seconds in ((Phase.FORWARD, trace.forward_s), (Phase.BACKWARD, trace.backward_s)):
        used = sum(s.weight * sum(numel[c] for c in s.chunks) for s in segments if s.phase is phase)
        per_element[phase] = seconds / used if used else 0.0
    return [[numel[c] * per_element[s.phase] for c in s.chunks] for s in segments]
