"""Placements that fit the budgets, in an order of preference; place() takes the first.

Sizes and budgets alone decide, not the speed of a machine: docs/decisions.md says what a search
for the least predicted step time gained. Per byte kept in RAM parameters save most traffic, then
gradients, then optimizer states, so RAM is given out in this order, after the pools.

By policy the tiers are

    cpu    RAM for all
    nvme   PARAM and GRAD in RAM, what does not fit in the file; OPTIM_STATE in the file;
           RAM that is left keeps it in buffers from step to step, unwritten
    auto   a device that is not RAM as far as there is room, then RAM, then the file
    cuda   the device for all
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import accumulate, product
from math import prod

from hetero.chunks.layout import Chunk, Layout
from hetero.planning.placement import (
    CONSTRUCTION_BYTES,
    GroupSpec,
    Placement,
    PlacementError,
    PoolSizes,
    link_buffers,
    waiting_bytes,
)
from hetero.planning.refusal import closest, words
from offload.memory.tiers import Tier

SmallestBudgets = dict[str, int | None]  # bytes of "host" and "device"
_UNLIMITED = 1 << 62  # bytes

# Buffers of the optimizer pipeline, and gathered and gradient slots beyond the fewest that work.
Headroom = tuple[int, int, int]
# Best first: with four buffers one is read, one updated and one written while one is spare.
HEADROOMS: tuple[Headroom, ...] = ((4, 2, 1), (2, 1, 0), (1, 0, 0))


def place(spec: GroupSpec) -> Placement:
    """The first candidate in the order of preference that fits the budgets of `spec`.

    Raises:
        PlacementError: none fits; it has the smallest budgets that work.
    """
    candidates = PlacementCandidates(spec)
    for candidate in candidates.in_order():
        made = candidates.checked(candidates.placement(candidate))
        if made is not None:
            return made
    raise candidates.refusal()


def smallest_budgets(
    place_within: Callable[[int, int | None], object], device: int | None
) -> SmallestBudgets:
    """The budgets that are just enough, for what fits the budgets that it has.

    Args:
        place_within: raises PlacementError if nothing fits so many bytes of RAM and of DEVICE.
        device: the budget of DEVICE that there is; None: DEVICE is RAM.

    Returns:
        Bytes of RAM beside `device`, and of DEVICE (None where it is RAM) beside ample RAM. What is
        not in RAM goes to disk, as far as there is room.
    """
    found: SmallestBudgets = {"host": 0, "device": None if device is None else 0}
    try:
        place_within(0, device)
    except PlacementError as refusal:
        found["host"] = refusal.smallest_host_bytes
    if device is not None:
        try:
            place_within(_UNLIMITED, 0)
        except PlacementError as refusal:
            found["device"] = refusal.smallest_device_bytes
    return found


@dataclass(frozen=True)
class ChunkCounts:
    """How many chunks are on DEVICE, and how many of the others have each kind of state in RAM.

    They are always the first ones in the order of PlacementCandidates. The rest is on DISK.
    """

    device: int
    param: int
    grad: int
    optim_state: int


@dataclass(frozen=True, kw_only=True)
class Candidate(PoolSizes):
    """A placement as counts of chunks, with its sizes but without homes by chunk."""

    counts: ChunkCounts


class _Ranked:
    """The chunks that are not on DEVICE, in the order in which they go to RAM, and sums of slots.

    Chunks of few slots go first: they fill what is left of the budget best. Of those with as many,
    however many are in RAM are spread over the model: so the disk, which fetches only some chunks
    ahead of compute, is busy all the time and not just in one part of forward.
    """

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self.chunks = sorted(chunks, key=lambda c: (c.slots, _spread(c.id)))
        trained = [c.slots if c.trainable else 0 for c in self.chunks]
        # Of the first k, and of the first k the trained ones alone.
        self.slots = list(accumulate((c.slots for c in self.chunks), initial=0))
        self.trained_slots = list(accumulate(trained, initial=0))
        # So many first chunks contain all trained ones.
        self.trained = max((k + 1 for k, slots in enumerate(trained) if slots), default=0)
        self.longest = max((c.slots for c in self.chunks), default=0)
        self.longest_trained = max(trained, default=0)


def _spread(number: int) -> int:
    """A key by which any first ones of 0, 1, 2, ... are evenly spread: the bits in reverse."""
    return int(f"{number:032b}"[::-1], 2)


class PlacementCandidates:
    """The placements of one chunk group that are worth a look, and their bytes."""

    def __init__(self, spec: GroupSpec) -> None:
        """Nothing is placed yet."""
        layout, dtypes, budgets = spec.layout, spec.dtypes, spec.budgets
        self._spec = spec
        self._slot = spec.slot
        self._host = budgets.host - budgets.taken_host - budgets.reserved_host
        self._host -= budgets.activations_host
        self._device = None
        if budgets.device is not None:
            self._device = budgets.device - budgets.taken_device - budgets.activations_device
        # Frozen chunks first: on DEVICE they take a fraction of the room, and save as many fetches.
        self._to_device = sorted(layout.chunks, key=lambda c: (c.trainable, c.slots, _spread(c.id)))
        self._ranked_without = lru_cache(maxsize=64)(lambda n: _Ranked(self._to_device[n:]))
        trained = [c for c in layout.chunks if c.trainable]
        frozen = len(layout.chunks) - len(trained)
        self._most_on_device = len(layout.chunks) if dtypes.device_updates else frozen
        self._longest_trained = max((c.slots for c in trained), default=0)
        numels = [s.param.numel for c in trained for s in c.slices]
        self._largest_grad_bytes = max(numels, default=0) * dtypes.param_bytes
        self._link_bytes = 0 if self._device is None else prod(link_buffers(layout, dtypes))
        self._several = layout.shard.ranks * layout.shard.replicas > 1
        self._in_making = [_in_making(layout, c, budgets.disk > 0) for c in layout.chunks]

    def in_order(self) -> Iterable[Candidate]:
        """From what usually is the fastest to the smallest, each using what the budget leaves.

        What every rank has whole stays in RAM: only shards are worth a way to the disk.
        """
        return (c for c in self._all_candidates() if self._allows(c.counts))

    def _allows(self, counts: ChunkCounts) -> bool:
        rest, shard = self._ranked_without(counts.device), self._spec.layout.shard
        return shard.params or counts.param == len(rest.chunks)

    def _all_candidates(self) -> Iterable[Candidate]:
        policy = self._spec.policy
        if policy in ("cpu", "auto", "cuda"):
            # Where everything is in RAM of one rank they make no difference.
            pools = self._several or self._device is not None
            for headroom in HEADROOMS if pools else HEADROOMS[-1:]:
                for device in self._device_choices(headroom):
                    n = len(self._ranked_without(device).chunks)
                    yield self.candidate(ChunkCounts(device, n, n, n), headroom)
        if policy in ("nvme", "auto"):
            for least in (1, 1), (1, 0), (0, 0):
                for headroom in HEADROOMS:
                    for device in self._device_choices(headroom):
                        n = len(self._ranked_without(device).chunks)
                        yield self._filled(device, least[0] * n, least[1] * n, headroom)
            yield from self._with_least_ram()

    def _device_choices(self, headroom: Headroom) -> Sequence[int]:
        """The most chunks that the policy has on DEVICE, as far as there is room, and the least."""
        everything = len(self._spec.layout.chunks)
        if self._spec.policy == "cuda":
            return (everything,)
        if self._device is None or self._spec.policy != "auto":
            return (0,)

        def device_bytes(count: int) -> int:
            n = len(self._ranked_without(count).chunks)
            return self.candidate(ChunkCounts(count, n, n, n), headroom).device_bytes

        # With everything there no slots are needed: more chunks may take less.
        if self._most_on_device == everything and device_bytes(everything) <= self._device:
            return everything, 0
        some = range(1, min(everything, self._most_on_device + 1))
        most = bisect_right(some, self._device, key=device_bytes)
        return (most, 0) if most else (0,)

    def _with_least_ram(self) -> Iterable[Candidate]:
        """Candidates of which one needs the least RAM of all.

        RAM per kind of state grows with the chunks in it, but falls where a pool becomes needless:
        when all trained chunks are in, or all chunks.
        """
        for device in self._device_choices(HEADROOMS[-1]):
            rest = self._ranked_without(device)
            n = len(rest.chunks)
            optim_states = (0, rest.trained) if self._spec.policy == "auto" else (0,)
            for in_ram in product((n, rest.trained, 0), (rest.trained, 0), optim_states):
                yield self.candidate(ChunkCounts(device, *in_ram), HEADROOMS[-1])

    def _filled(self, device: int, param: int, grad: int, headroom: Headroom) -> Candidate:
        """At least `param` and `grad` chunks in RAM, then as many of each kind of state as fit."""
        in_ram = [param, grad, 0]
        rest = self._ranked_without(device)
        for state_kind in range(3 if self._spec.policy == "auto" else 2):

            def host_bytes(count: int, state_kind: int = state_kind) -> int:
                counts = (*in_ram[:state_kind], count, *in_ram[state_kind + 1 :])
                return self.candidate(ChunkCounts(device, *counts), headroom).host_bytes

            more = range(in_ram[state_kind] + 1, len(rest.chunks) + 1)
            in_ram[state_kind] += bisect_right(more, self._host, key=host_bytes)
        keeps = self._spec.overlaps_updates and self._spec.budgets.keep_optim_states
        if keeps and in_ram[2] < rest.trained:
            # Where every step updates in the same order, buffers keep the tiles that forward waits
            # for first, which homes of whole chunks, spread over the model, do not.
            in_ram[2] = 0
        return self.candidate(ChunkCounts(device, *in_ram), headroom, fills=True)

    def candidate(self, counts: ChunkCounts, headroom: Headroom, fills: bool = False) -> Candidate:
        """The pools that `counts` need, and the bytes of it all.

        `fills`: RAM that is left keeps optimizer states between steps, in more buffers.
        """
        rest, slot, shard = self._ranked_without(counts.device), self._slot, self._spec.layout.shard
        separate = self._device is not None
        buffers, more_gathered, more_grad = headroom
        param_on_disk = counts.param < len(rest.chunks)
        trained_param_on_disk = counts.param < rest.trained
        grad_on_disk = counts.grad < rest.trained
        optim_state_on_disk = counts.optim_state < rest.trained
        several = shard.ranks > 1
        elsewhere = several and shard.params
        everything = self._ranked_without(0)
        streamed = rest.trained_slots[-1] - rest.trained_slots[counts.optim_state]
        averaged = self._several and self._longest_trained > 0
        in_ram = rest.slots[counts.param] * slot.param
        in_ram += rest.trained_slots[counts.grad] * slot.grad
        in_ram += rest.trained_slots[counts.optim_state] * slot.optim_state
        homed = rest.slots[-1] * slot.param + rest.trained_slots[-1] * (
            slot.grad + slot.optim_state
        )

        gathers = param_on_disk or elsewhere or (separate and bool(rest.chunks))
        gathered_slots = self._spec.min_gathered_slots + more_gathered if gathers else 0
        on_the_way = param_on_disk and (several or separate)
        shard_slots = rest.longest + more_gathered if on_the_way else 0
        # Also shards at home on DEVICE are gathered in RAM.
        staged = separate and elsewhere
        staged_slots = everything.longest + more_gathered if staged else 0
        # Where devices gather by themselves each has memory for all that comes, and does not stay.
        unkept_slots = 0
        if separate and several and shard.between_devices:
            unkept_slots = (everything if shard.params else rest).longest
        grad_slots = rest.longest_trained + more_grad if grad_on_disk else 0
        bucket_slots = receive_slots = 0
        if averaged:
            receive_slots = self._longest_trained * (2 if more_grad else 1)
            bucket_slots = self._longest_trained + more_gathered
            if self._spec.reduce_at_end:
                bucket_slots = everything.trained_slots[-1]
        if not (trained_param_on_disk or grad_on_disk or optim_state_on_disk):
            buffers = 0
        buffer_bytes = slot.optim_state
        buffer_bytes += slot.param if trained_param_on_disk else 0
        buffer_bytes += slot.grad if grad_on_disk else 0

        pools = grad_slots * slot.grad + shard_slots * slot.param + staged_slots * slot.gathered
        pools += self._link_bytes
        if self._spec.checksums is not None:
            trained = everything.trained_slots[-1] * (slot.param + slot.optim_state)
            in_memory = everything.slots[-1] * slot.param
            in_memory += everything.trained_slots[-1] * slot.optim_state
            in_memory -= (rest.slots[-1] - rest.slots[counts.param]) * slot.param
            in_memory -= streamed * slot.optim_state
            pools += self._spec.checksums.most_bytes(homed - in_ram, in_memory, trained)
        pools += buffers * buffer_bytes
        reduce_bytes = (bucket_slots + receive_slots) * slot.bucket
        if averaged and shard.replicas > 1:  # what other replicas send
            reduce_bytes += self._longest_trained * slot.bucket // shard.ranks
        if self._spec.averages_on_device:
            reduce_bytes += self._longest_trained * slot.bucket  # zeros
            pools += receive_slots * slot.bucket // shard.ranks  # means on their way home
        else:
            pools += reduce_bytes
        device_bytes = grad_offload_bytes = 0
        if self._device is None:
            pools += gathered_slots * slot.gathered
        else:
            device_bytes = (everything.slots[-1] - rest.slots[-1]) * slot.param
            trained = everything.trained_slots[-1] - rest.trained_slots[-1]
            device_bytes += trained * (slot.grad + slot.optim_state)
            if self._spec.averages_on_device:
                device_bytes += reduce_bytes
            if rest.trained and not self._spec.averages_on_device:
                grad_offload_bytes = self._largest_grad_bytes * (2 if more_gathered else 1)
            device_bytes += grad_offload_bytes + (gathered_slots + unkept_slots) * slot.gathered
            # More slots on DEVICE only save fetches: they take nothing from anything else.
            all_slots = (everything if elsewhere else rest).slots[-1]
            spare = (self._device - device_bytes) // slot.gathered
            more = max(0, min(all_slots - gathered_slots, spare)) if gathers else 0
            gathered_slots += more
            device_bytes += more * slot.gathered
        if fills and buffers and self._spec.budgets.keep_optim_states:
            spare = (self._host - in_ram - pools) // buffer_bytes
            kept = max(0, min(streamed - buffers, spare))
            buffers += kept
            pools += kept * buffer_bytes
        return Candidate(
            counts=counts,
            gathered_slots=gathered_slots,
            grad_slots=grad_slots,
            buffers=buffers,
            shard_slots=shard_slots,
            bucket_slots=bucket_slots,
            receive_slots=receive_slots,
            staged_slots=staged_slots,
            unkept_slots=unkept_slots,
            grad_offload_bytes=grad_offload_bytes,
            pool_bytes=pools,
            host_bytes=in_ram + pools,
            disk_bytes=homed - in_ram,
            device_bytes=device_bytes,
        )

    def placement(self, candidate: Candidate) -> Placement:
        """The placement that `candidate` is, without what construction needs."""
        counts, rest = candidate.counts, self._ranked_without(candidate.counts.device)

        def homes(count: int) -> list[Tier]:
            made = [Tier.DEVICE] * len(self._spec.layout.chunks)
            for rank, chunk in enumerate(rest.chunks):
                made[chunk.id] = Tier.HOST if rank < count else Tier.DISK
            return made

        def trained_homes(count: int) -> tuple[Tier | None, ...]:
            pairs = zip(homes(count), self._spec.layout.chunks, strict=True)
            return tuple(tier if chunk.trainable else None for tier, chunk in pairs)

        return Placement(
            param=tuple(homes(counts.param)),
            grad=trained_homes(counts.grad),
            optim_state=trained_homes(counts.optim_state),
            longest_trained=self._longest_trained,
            **{size.name: getattr(candidate, size.name) for size in fields(PoolSizes)},
        )

    def checked(self, made: Placement) -> Placement | None:
        """`made` with what construction takes, if it fits the budgets."""
        budgets = self._spec.budgets
        made, total = self._with_construction(made)
        if total.host_bytes > budgets.host or total.disk_bytes > budgets.disk:
            return None
        if budgets.device is not None and total.device_bytes > budgets.device:
            return None
        gathered = budgets.taken_gathered + made.gathered_slots * self._slot.gathered
        if budgets.gathered is not None and gathered > budgets.gathered:
            return None
        return made

    def refusal(self) -> PlacementError:
        """Why no candidate fits, with the smallest budgets that work."""
        tried = [self._with_construction(self.placement(c))[1] for c in self.in_order()]
        smallest = closest(tried, self._spec.budgets)
        return PlacementError(
            words(smallest, self._spec), smallest.host_bytes, smallest.device_bytes
        )

    def _with_construction(self, made: Placement) -> tuple[Placement, Placement]:
        """`made` with what construction takes, and together with what other chunk groups have."""
        budgets = self._spec.budgets
        building = 0
        if budgets.under_construction:
            building = self._building_bytes(made)
        made = replace(made, host_bytes=max(made.host_bytes, building))
        total = replace(
            made,
            host_bytes=budgets.taken_host
            + budgets.reserved_host
            + budgets.activations_host
            + max(made.host_bytes, building + budgets.waiting),
            disk_bytes=budgets.taken_disk + made.disk_bytes,
            device_bytes=budgets.taken_device + budgets.activations_device + made.device_bytes,
        )
        return made, total

    def _building_bytes(self, made: Placement) -> int:
        """The most RAM while chunks are made, one by one, from fp32 parameters.

        Pools are there from the start if there are several ranks, and the buffers of the link;
        gradients not yet, and a chunk's homes not before its parameters' values are at hand. (One
        rank makes pools for what goes to disk, and then parameters wait in RAM only if they stay.)
        """
        layout, slot = self._spec.layout, self._slot
        stay = any(s.param.stays for c in layout.chunks for s in c.slices)
        most = max(s.param.numel for c in layout.chunks for s in c.slices) * CONSTRUCTION_BYTES
        waiting = sum(each.waiting for each in self._in_making)
        bytes_now = made.pool_bytes if self._several or stay else self._link_bytes
        for chunk, own in zip(layout.chunks, self._in_making, strict=True):
            waiting -= own.waiting
            most = max(most, bytes_now + waiting + own.coming)
            for tier, slot_bytes in (
                (made.param[chunk.id], slot.param),
                (made.optim_state[chunk.id], slot.optim_state),
            ):
                bytes_now += chunk.slots * slot_bytes if tier is Tier.HOST else 0
            most = max(most, bytes_now + waiting + own.here)
        return most


@dataclass(frozen=True)
class _ChunkInMaking:
    """RAM of one chunk's parameters, in fp32, while their values go from where they wait to it.

    Attributes:
        waiting: until they come to the chunk, nothing of which is there yet.
        coming: the most while they come.
        here: when they are there, and the chunk's homes take their values.
    """

    waiting: int
    coming: int
    here: int


def _in_making(layout: Layout, chunk: Chunk, disk: bool) -> _ChunkInMaking:
    """What the chunk's parameters take, on the rank on which they take most.

    Of several ranks each keeps its part of a parameter that waits. One parameter after the other,
    they bring each rank the elements of its shard, which may be all of them, and free the parts.
    With a disk parameters wait there, and of one at a time the part passes through RAM. One that
    stays is there until the chunk is made.
    """
    shard, params = layout.shard, [s.param for s in chunk.slices]
    waiting = waiting_bytes(params, shard.ranks, disk)
    if shard.ranks == 1:  # which fills the chunk from where they wait
        return _ChunkInMaking(waiting, waiting, waiting)
    stay = waiting_bytes((p for p in params if p.stays), shard.ranks, disk)
    parts = [0 if p.stays else waiting_bytes([p], shard.ranks, False) for p in params]
    left = sum(parts)
    coming, here = 0, [0] * shard.ranks  # by rank
    shard_numel = shard.numel(layout.chunk_numel(chunk))
    for s, part in zip(chunk.slices, parts, strict=True):
        for rank in range(s.offset // shard_numel, (s.end - 1) // shard_numel + 1):
            begin = rank * shard_numel
            numel = min(s.end, begin + shard_numel) - max(s.offset, begin)
            here[rank] += numel * CONSTRUCTION_BYTES
        coming = max(coming, max(here) + (part if disk else left))
        left -= part
    return _ChunkInMaking(waiting, stay + coming, stay + max(here))
