"""What a training step takes under a placement: seconds by phase and resource, and bytes moved.

A step is forward and backward of each micro-batch, which `step_timeline.py` follows use by use,
then the update. What the update knows:

- It begins when all gradients are there, and all ranks have agreed on the step.
- It goes through tiles, with a disk that reads and writes at once. Of T tiles whose
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

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import ceil

from hetero.overlap import STREAMING_BUFFERS, OverlapUpdates
from hetero.planning.collective_cost import agreement_s
from hetero.planning.placement import Placement, SlotBytes
from hetero.planning.step_timeline import (
    ALL_GATHERS,
    COMPUTE,
    CPU_UPDATE,
    D2H,
    DEVICE_UPDATE,
    H2D,
    MEANS,
    NETWORK,
    NODE_LINKS,
    NVME,
    RESOURCES,
    Collectives,
    PhaseCost,
    Problem,
    StepTimeline,
    disk_rates,
    segments,
)
from hetero.planning.trace import use_order
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
        self.segments = segments(problem.layout, problem.trace)

    def cost(self, made: Placement) -> StepCost:
        """What a step takes under the placement `made`.

        Raises:
            ValueError: the profile says nothing about updates in these dtypes.
        """
        totals: dict[str, PhaseCost] = {}
        traffic: Counter[str] = Counter()
        walked = StepTimeline(self.problem, made, self.gathered(made)).walk(self.segments)
        for segment, (one, moved) in zip(self.segments, walked, strict=True):
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

        They do from a device of its own, and with stage 1 from other replicas, or from devices.
        """
        shard = self.problem.layout.shard
        if shard.ranks * shard.replicas == 1:
            return self.problem.profile.separate
        return not shard.grads and (shard.replicas > 1 or self.problem.between_devices)

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
        at_end_s, traffic, busy_at_end_s = self._communicated_at_end(made)
        busy = {
            CPU_UPDATE: host_s + norm_s,
            NVME: nvme_s,
            DEVICE_UPDATE: device_s,
            **busy_at_end_s,
        }
        total = at_end_s + norm_s + max(seconds, device_s)
        return (
            PhaseCost("update", total, busy),
            {"nvme_read": read, "nvme_written": written, **traffic},
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

    def _communicated_at_end(
        self, made: Placement
    ) -> tuple[float, dict[str, int], dict[str, float]]:
        """Seconds, bytes that this rank moves and busy seconds, of what ranks do around the update.

        They agree on the step, and average gradients (stage 1) and gather parameters (stages 1 and
        2) that they have whole. Between devices what is at home in RAM crosses the link for that.
        """
        shard, network = self.problem.layout.shard, self.problem.network
        total_s = 0.0 if network is None else agreement_s(network)
        busy = dict.fromkeys((NODE_LINKS, NETWORK, ALL_GATHERS, MEANS, H2D, D2H), 0.0)
        sent, crossed = 0.0, {H2D: 0, D2H: 0}
        collectives = Collectives(self.problem)
        for chunk in self.trained:
            slots = self.slots[chunk]
            costs = [] if shard.grads else [(MEANS, each) for each in collectives.mean(slots)]
            if shard.ranks > 1 and not shard.params:
                costs.append((ALL_GATHERS, collectives.gather(slots)))
                if self.problem.between_devices and made.param[chunk] is not Tier.DEVICE:
                    whole = slots * self.slot.gathered
                    crossed[H2D] += whole // shard.ranks
                    crossed[D2H] += whole - whole // shard.ranks
            averages = self.problem.between_devices and costs and not shard.grads
            if averages and made.grad[chunk] is not Tier.DEVICE:
                crossed[H2D] += slots * self.slot.bucket
                crossed[D2H] += slots * self.slot.bucket // shard.ranks
            for stream, cost in costs:
                total_s += cost.seconds
                sent += cost.bytes_sent
                busy[stream] += cost.seconds
                busy[NETWORK if cost.crosses_nodes else NODE_LINKS] += cost.transfer_s
        profile = self.problem.profile
        for way, rate in ((H2D, profile.h2d_bytes_per_s), (D2H, profile.d2h_bytes_per_s)):
            if crossed[way] and rate is not None:
                busy[way] = crossed[way] / rate
                total_s += busy[way]
        traffic = {"sent": round(sent), "h2d": crossed[H2D], "d2h": crossed[D2H]}
        return total_s, traffic, busy


def _nvme_seconds(profile: Rates, read: int, written: int) -> float:
    """As much of both as there is goes at the mixed rate, the rest alone."""
    if not read + written:
        return 0.0
    reading, writing = disk_rates(profile, False)
    mixed, _ = disk_rates(profile, True)
    both = min(read, written)
    return 2 * both / mixed + (read - both) / reading + (written - both) / writing
