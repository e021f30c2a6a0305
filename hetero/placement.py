"""Where every chunk's payloads live: a pure function of sizes and budgets.

This is a static placement. A planner that has traced a step takes its place by returning the same
`Placement`; the runtime only carries it out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from hetero.dtypes import Dtypes
from hetero.layout import Chunk, Layout
from offload.errors import BudgetError
from offload.sizes import format_bytes
from offload.tiers import Tier

CONSTRUCTION_BYTES = 4  # of a parameter element as it is constructed
# (buffers, gathered slots and gradient slots beyond the smallest number that works), best first:
# with four buffers one is read, one computed and one written while one is spare.
_COMFORT = ((4, 2, 1), (2, 1, 0), (1, 0, 0))


class PlacementError(BudgetError):
    """No placement fits; `smallest_host_bytes` of RAM are what one needs at least."""

    def __init__(self, message: str, smallest_host_bytes: int) -> None:
        super().__init__(message)
        self.smallest_host_bytes = smallest_host_bytes


@dataclass(frozen=True)
class Budgets:
    """Bytes that may be used: of RAM, of file space (0: no directory), and for gathered slots.

    `keep_records`: RAM that is left may keep records of DISK-homed chunks between steps. Other
    banks have `taken_...` of the budgets; while this bank's chunks are made, `waiting` bytes of
    parameters of banks to come are in RAM. Not `under_construction`: first values come from
    elsewhere.
    """

    host: int
    disk: int
    gathered: int | None = None
    keep_records: bool = True
    taken_host: int = 0
    taken_disk: int = 0
    taken_gathered: int = 0
    waiting: int = 0
    under_construction: bool = True


@dataclass(frozen=True)
class SlotBytes:
    """Bytes that one slot of a chunk takes: at home on this rank, gathered, and in a bucket."""

    param: int
    grad: int
    record: int
    gathered: int
    bucket: int

    @classmethod
    def of(cls, layout: Layout, dtypes: Dtypes) -> SlotBytes:
        """The slots of `layout` in `dtypes`."""
        whole, piece, shard = layout.slot_numel, layout.piece_numel, layout.shard
        return cls(
            (piece if shard.params else whole) * dtypes.param_bytes,
            (piece if shard.grads else whole) * dtypes.grad_bytes,
            piece * dtypes.record_bytes,
            whole * dtypes.param_bytes,
            whole * dtypes.reduce_bytes,
        )


@dataclass(frozen=True)
class Placement:
    """Homes per chunk id (GRAD and RECORD of frozen chunks: None), and the sizes of the pools."""

    param: tuple[Tier, ...]
    grad: tuple[Tier | None, ...]
    record: tuple[Tier | None, ...]
    gathered_slots: int  # for copies of parameters that are on DISK or on other ranks
    grad_slots: int  # for DISK-homed gradients on their way
    buffers: int  # of the optimizer pipeline
    host_bytes: int  # of RAM, homes and pools together
    disk_bytes: int  # of the file
    shard_slots: int = 0  # for this rank's shards of DISK-homed parameters, on their way to ranks
    bucket_slots: int = 0  # for whole gradients until they are averaged over the ranks
    receive_slots: int = 0  # for other ranks' gradients while they are averaged
    longest_trained: int = 0  # slots of the longest chunk that is trained
    pool_bytes: int = 0  # of RAM, slots and buffers without homes

    @property
    def trained_param_on_disk(self) -> bool:
        """Whether the optimizer finds parameters in the file."""
        pairs = zip(self.param, self.record, strict=True)
        return any(p is Tier.DISK and r is not None for p, r in pairs)


def concurrent_slots(chunk_sets: Iterable[Sequence[Chunk]]) -> int:
    """The slots that always find room for any one of `chunk_sets` held at once.

    With k other runs leased in the worst places, a run of r finds room in
    others + (k + 1) (r - 1) + 1 slots.
    """
    need = 1
    for chunks in chunk_sets:
        longest = max(c.slots for c in chunks)
        others = sum(c.slots for c in chunks) - longest
        need = max(need, others + len(chunks) * (longest - 1) + 1)
    return need


def place(
    layout: Layout,
    dtypes: Dtypes,
    policy: str,
    budgets: Budgets,
    min_gathered_slots: int,
    held: bool = False,
) -> Placement:
    """Homes for `layout` under `policy` ("cpu", "nvme" or "auto").

    Per byte kept in RAM parameters save most traffic, then gradients, then records; so RAM is given
    out in this order, after the pools. `held`: of several ranks each keeps whole gradients until
    the end of backward. Raises BudgetError with the smallest budget that works.
    """
    slot = SlotBytes.of(layout, dtypes)
    maker = _Maker(layout, slot, policy, min_gathered_slots, budgets, held)
    tried: list[Placement] = []  # with what other banks have
    for candidate in maker.candidates():
        building = 0
        if budgets.under_construction:
            building = _building_bytes(layout, slot, candidate, budgets.disk > 0)
        candidate = replace(candidate, host_bytes=max(candidate.host_bytes, building))
        total = replace(
            candidate,
            host_bytes=budgets.taken_host + max(candidate.host_bytes, building + budgets.waiting),
            disk_bytes=budgets.taken_disk + candidate.disk_bytes,
        )
        if total.host_bytes <= budgets.host and total.disk_bytes <= budgets.disk:
            gathered = budgets.taken_gathered + candidate.gathered_slots * slot.gathered
            if budgets.gathered is None or gathered <= budgets.gathered:
                return candidate
        tried.append(total)
    smallest = _closest(tried, budgets)
    message = _refusal(smallest, budgets, slot, policy, layout)
    raise PlacementError(message, smallest.host_bytes)


def _closest(tried: Sequence[Placement], budgets: Budgets) -> Placement:
    """The one that misses least, so that the numbers in the refusal are true to the byte."""
    if not budgets.disk:
        tried = [p for p in tried if not p.disk_bytes] or tried
    in_host = [p for p in tried if p.host_bytes <= budgets.host]
    if in_host:
        return min(in_host, key=lambda p: (max(p.disk_bytes, budgets.disk), p.host_bytes))
    return min(tried, key=lambda p: p.host_bytes)


class _Maker:
    """Makes placements in which some chunks of each payload are in RAM, the others on DISK.

    Chunks of few slots go to RAM first: they fill what is left of the budget best.
    """

    def __init__(
        self,
        layout: Layout,
        slot: SlotBytes,
        policy: str,
        min_gathered: int,
        budgets: Budgets,
        held: bool,
    ) -> None:
        self._chunks = layout.chunks
        self._shard = layout.shard
        by_size = sorted(layout.chunks, key=lambda c: (c.slots, c.id))
        self._rank = {chunk.id: rank for rank, chunk in enumerate(by_size)}
        self._slot = slot
        self._policy = policy
        self._host = budgets.host - budgets.taken_host
        self._keep_records = budgets.keep_records
        self._min_gathered = min_gathered
        self._min_grad = max((c.slots for c in layout.chunks if c.trainable), default=0)
        self._bucket_slots: int | None = None
        if held:
            self._bucket_slots = sum(c.slots for c in layout.chunks if c.trainable)
        self._longest = max(c.slots for c in layout.chunks)
        self._pools_needed = layout.shard.ranks * layout.shard.replicas > 1

    def candidates(self) -> Iterable[Placement]:
        """Placements from the fastest to the smallest, each using what room the budget leaves.

        What every rank has whole is in RAM: only shards are worth a way to the disk.
        """
        return (
            candidate
            for candidate in self._all_candidates()
            if (self._shard.params or Tier.DISK not in candidate.param)
            and (self._shard.grads or Tier.DISK not in candidate.grad)
        )

    def _all_candidates(self) -> Iterable[Placement]:
        n = len(self._chunks)
        if self._policy in ("cpu", "auto"):
            for comfort in _COMFORT if self._pools_needed else _COMFORT[-1:]:
                yield self._placement((n, n, n), comfort)
        if self._policy in ("nvme", "auto"):
            for param, grad in ((n, n), (n, 0), (0, 0)):
                for comfort in _COMFORT:
                    yield self._filled(param, grad, comfort)
            yield from self._frugal()

    def _frugal(self) -> Iterable[Placement]:
        """Placements of which one needs the least RAM of all.

        RAM per payload grows with the chunks in it, but falls where a pool becomes needless: when
        all trained chunks are in, or all chunks.
        """
        n = len(self._chunks)
        trained = max((self._rank[c.id] + 1 for c in self._chunks if c.trainable), default=0)
        records = (0, trained) if self._policy == "auto" else (0,)
        for in_ram in product((n, trained, 0), (trained, 0), records):
            yield self._placement(in_ram, _COMFORT[-1])

    def _filled(self, param: int, grad: int, comfort: tuple[int, int, int]) -> Placement:
        """At least `param` and `grad` chunks in RAM, then as many of each payload as fit."""
        host = self._host
        in_ram = [param, grad, 0]
        for payload in range(3 if self._policy == "auto" else 2):

            def host_bytes(count: int, payload: int = payload) -> int:
                counts = (*in_ram[:payload], count, *in_ram[payload + 1 :])
                return self._placement(counts, comfort).host_bytes

            more = range(in_ram[payload] + 1, len(self._chunks) + 1)
            in_ram[payload] += bisect_right(more, host, key=host_bytes)
        return self._with_more_buffers(self._placement(tuple(in_ram), comfort))

    def _with_more_buffers(self, placement: Placement) -> Placement:
        """RAM that is left keeps records between steps, in more buffers."""
        if not placement.buffers or not self._keep_records:
            return placement
        streamed = sum(c.slots for c in self._chunks if placement.record[c.id] is Tier.DISK)
        buffer_bytes = self._buffer_bytes(placement)
        spare = (self._host - placement.host_bytes) // buffer_bytes
        more = max(0, min(streamed - placement.buffers, spare))
        return replace(
            placement,
            buffers=placement.buffers + more,
            host_bytes=placement.host_bytes + more * buffer_bytes,
            pool_bytes=placement.pool_bytes + more * buffer_bytes,
        )

    def _buffer_bytes(self, placement: Placement) -> int:
        slot = self._slot
        return (
            slot.record
            + (slot.param if placement.trained_param_on_disk else 0)
            + (slot.grad if Tier.DISK in placement.grad else 0)
        )

    def _placement(self, in_ram: tuple[int, ...], comfort: tuple[int, int, int]) -> Placement:
        """in_ram[payload] chunks' payloads in RAM, and the pools which that needs."""

        def home(chunk: Chunk, count: int) -> Tier:
            return Tier.HOST if self._rank[chunk.id] < count else Tier.DISK

        param = tuple(home(c, in_ram[0]) for c in self._chunks)
        grad = tuple(home(c, in_ram[1]) if c.trainable else None for c in self._chunks)
        record = tuple(home(c, in_ram[2]) if c.trainable else None for c in self._chunks)
        homed = dict.fromkeys(Tier, 0)
        slot = self._slot
        for homes, slot_bytes in ((param, slot.param), (grad, slot.grad), (record, slot.record)):
            for chunk, tier in zip(self._chunks, homes, strict=True):
                if tier is not None:
                    homed[tier] += chunk.slots * slot_bytes
        buffers, more_gathered, more_grad = comfort
        several = self._shard.ranks > 1
        elsewhere = several and self._shard.params
        bucket_slots = self._bucket_slots or self._min_grad + more_gathered
        averaged = self._pools_needed and self._min_grad > 0
        bare = Placement(
            param=param,
            grad=grad,
            record=record,
            gathered_slots=self._min_gathered + more_gathered
            if Tier.DISK in param or elsewhere
            else 0,
            grad_slots=self._min_grad + more_grad if Tier.DISK in grad else 0,
            buffers=0,
            host_bytes=0,
            disk_bytes=homed[Tier.DISK],
            shard_slots=self._longest + more_gathered if Tier.DISK in param and several else 0,
            bucket_slots=bucket_slots if averaged and self._shard.grads else 0,
            longest_trained=self._min_grad,
            receive_slots=self._min_grad * (2 if more_grad else 1) if averaged else 0,
        )
        if not (bare.trained_param_on_disk or Tier.DISK in grad or Tier.DISK in record):
            buffers = 0
        pools = bare.gathered_slots * slot.gathered + bare.grad_slots * slot.grad
        pools += bare.shard_slots * slot.param
        pools += (bare.bucket_slots + bare.receive_slots) * slot.bucket
        if averaged and self._shard.replicas > 1:
            pools += self._min_grad * slot.bucket // self._shard.ranks
        pools += buffers * self._buffer_bytes(bare)
        return replace(bare, buffers=buffers, host_bytes=homed[Tier.HOST] + pools, pool_bytes=pools)


def _building_bytes(layout: Layout, slot: SlotBytes, made: Placement, disk: bool) -> int:
    """The most RAM while chunks are made, one by one, from fp32 parameters.

    Of several ranks each keeps its part of the parameters that wait; with a disk they wait there,
    all but the largest, or, of several ranks, the part of a chunk that is being made. Pools are
    there from the start if there are several ranks, gradients not yet.
    """
    shard = layout.shard
    params = [[s.param.numel * CONSTRUCTION_BYTES for s in c.slices] for c in layout.chunks]
    largest = max(map(max, params))
    alone = shard.ranks * shard.replicas == 1
    if disk and alone:
        return largest
    waiting = 0 if disk else sum(map(sum, params)) // shard.ranks
    bytes_now = 0 if alone else made.pool_bytes
    most = 0
    for chunk, sizes in zip(layout.chunks, params, strict=True):
        # Rounding up, and what is sent and received at a time.
        fetched = 0 if alone else (sum(sizes) + max(sizes)) // shard.ranks + 64 * len(sizes)
        for tier, slot_bytes in (
            (made.param[chunk.id], slot.param),
            (made.record[chunk.id], slot.record),
        ):
            bytes_now += chunk.slots * slot_bytes if tier is Tier.HOST else 0
        most = max(most, bytes_now + waiting + fetched)
        waiting -= 0 if disk else sum(sizes) // shard.ranks
    return max(most, 0 if alone else largest)


def _refusal(
    smallest: Placement, budgets: Budgets, slot: SlotBytes, policy: str, layout: Layout
) -> str:
    parts = [
        f"policy {policy!r} cannot hold {layout.numel:,} parameters in "
        f"{len(layout.chunks)} chunks of {layout.slot_numel:,} elements:"
    ]
    if budgets.taken_host or budgets.taken_disk:
        parts.append(
            f"other parameters of this model, and reserve_memory, take "
            f"{format_bytes(budgets.taken_host)} of RAM and {format_bytes(budgets.taken_disk)} of "
            f"disk;"
        )
    if smallest.host_bytes > budgets.host:
        parts.append(
            f"host_memory is {format_bytes(budgets.host)} ({budgets.host} bytes), and the smallest "
            f"that works is {format_bytes(smallest.host_bytes)} ({smallest.host_bytes} bytes);"
        )
    if smallest.disk_bytes > budgets.disk:
        what = (
            "nvme_capacity or the free space there"
            if budgets.disk
            else "nvme_path is not given, so disk space"
        )
        parts.append(
            f"{what} is {format_bytes(budgets.disk)}, and with that much RAM "
            f"{format_bytes(smallest.disk_bytes)} ({smallest.disk_bytes} bytes) go to disk;"
        )
    gathered = budgets.taken_gathered + smallest.gathered_slots * slot.gathered
    if budgets.gathered is not None and gathered > budgets.gathered:
        parts.append(
            f"device_memory is {format_bytes(budgets.gathered)}, and gathered parameters need "
            f"{format_bytes(gathered)} ({gathered} bytes);"
        )
    fixes = "raise host_memory, or set a smaller chunk_numel"
    if policy == "cpu":
        fixes = "raise host_memory, or use placement_policy='nvme' or 'auto' with nvme_path"
    elif not budgets.disk:
        fixes = "give nvme_path, or raise host_memory"
    if not budgets.under_construction and smallest.host_bytes > budgets.host:
        fixes = (
            f"initialize with reserve_memory={smallest.host_bytes - budgets.taken_host} or more, "
            f"of host_memory, which is then left for parameters that come later"
        )
    return " ".join([*parts, fixes])
