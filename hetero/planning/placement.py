"""Where every chunk's kinds of state live: pure functions of sizes and budgets.

`Maker` makes candidates; place() takes the first that fits, in an order of preference that suits
most machines. plan.py takes the one whose step it predicts to be the fastest. Both return a
`Placement`, which the runtime only carries out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, product

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Chunk, Layout
from hetero.planning.refusal import closest, words
from offload.device.grad_offload import BUFFERS, buffer_bytes
from offload.errors import BudgetError
from offload.memory.tiers import Tier

CONSTRUCTION_BYTES = 4  # of a parameter element as it is constructed
# (buffers, gathered slots and gradient slots beyond the smallest number that works), best first:
# with four buffers one is read, one computed and one written while one is spare.
Headroom = tuple[int, int, int]
HEADROOMS: tuple[Headroom, ...] = ((4, 2, 1), (2, 1, 0), (1, 0, 0))


class PlacementError(BudgetError):
    """No placement fits; `smallest_host_bytes` of RAM are what one needs at least.

    Likewise `smallest_device_bytes` of a DEVICE that is not RAM (0: there is none).
    """

    def __init__(
        self, message: str, smallest_host_bytes: int, smallest_device_bytes: int = 0
    ) -> None:
        super().__init__(message)
        self.smallest_host_bytes = smallest_host_bytes
        self.smallest_device_bytes = smallest_device_bytes


@dataclass(frozen=True)
class Budgets:
    """Bytes that may be used: of RAM, of file space (0: no directory), and for gathered slots.

    `device`: bytes of a DEVICE that has memory of its own; None: DEVICE and HOST are the same.
    `keep_records`: RAM that is left may keep optimizer states of DISK-homed chunks between steps.
    Other chunk groups have `taken_...` of the budgets, and `reserved_host` is for what comes later;
    while this chunk group's chunks are made, `waiting` bytes of parameters of chunk groups to come
    are in RAM. Not `under_construction`: first values come from elsewhere.
    """

    host: int
    disk: int
    gathered: int | None = None
    device: int | None = None
    keep_optim_states: bool = True
    taken_host: int = 0
    reserved_host: int = 0
    taken_disk: int = 0
    taken_gathered: int = 0
    taken_device: int = 0
    waiting: int = 0
    under_construction: bool = True


@dataclass(frozen=True)
class SlotBytes:
    """Bytes that one slot of a chunk takes: at home on this rank, gathered, and in a bucket."""

    param: int
    grad: int
    optim_state: int
    gathered: int
    bucket: int

    @classmethod
    def of(cls, layout: Layout, dtypes: Dtypes) -> SlotBytes:
        """The slots of `layout` in `dtypes`."""
        whole, tile, shard = layout.slot_numel, layout.tile_numel, layout.shard
        return cls(
            (tile if shard.params else whole) * dtypes.param_bytes,
            (tile if shard.grads else whole) * dtypes.grad_bytes,
            tile * dtypes.optim_state_bytes,
            whole * dtypes.param_bytes,
            whole * dtypes.reduce_bytes,
        )


def link_bytes(layout: Layout, dtypes: Dtypes) -> int:
    """Of RAM, for the buffers of what is on its way between a DEVICE of its own and RAM."""
    largest = max(s.param.numel for c in layout.chunks for s in c.slices)
    return BUFFERS * buffer_bytes(largest * dtypes.param_bytes)


@dataclass(frozen=True)
class Placement:
    """Homes per chunk id (GRAD and OPTIM_STATE of frozen chunks: None), and the sizes of the pools.

    A chunk with one kind of state on DEVICE has all there and is updated there. Gathered slots are
    in RAM if DEVICE is RAM, else on DEVICE.
    """

    param: tuple[Tier, ...]
    grad: tuple[Tier | None, ...]
    optim_state: tuple[Tier | None, ...]
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
    device_bytes: int = 0  # of a DEVICE that is not RAM, homes and slots together
    staged_slots: int = (
        0  # of RAM, for whole copies of several ranks' shards on their way to DEVICE
    )
    grad_offload_bytes: int = 0  # of DEVICE, for gradients on their way to RAM

    @property
    def trained_param_on_disk(self) -> bool:
        """Whether the optimizer finds parameters in the file."""
        pairs = zip(self.param, self.optim_state, strict=True)
        return any(p is Tier.DISK and r is not None for p, r in pairs)


def concurrent_slots(chunk_sets: Iterable[Sequence[Chunk]]) -> int:
    """The slots that always find room for any one of `chunk_sets` held at once.

    With k other runs pinned in the worst places, a run of r finds room in
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
    """Homes for `layout` under `policy` ("cpu", "nvme", "auto", and "cuda" with a separate DEVICE).

    Per byte kept in RAM parameters save most traffic, then gradients, then optimizer states; so RAM
    is given out in this order, after the pools. `held`: of several ranks each keeps whole gradients
    until the end of backward. Raises BudgetError with the smallest budget that works.
    """
    maker = Maker(layout, dtypes, policy, budgets, min_gathered_slots, held)
    for candidate in maker.candidates():
        made = maker.checked(maker.placement(candidate))
        if made is not None:
            return made
    raise maker.refusal()


@dataclass(frozen=True)
class Split:
    """How many chunks are on DEVICE, and of the others, how many have each kind of state in RAM.

    Always the first ones in the Maker's order. What is in neither is on DISK.
    """

    device: int
    param: int
    grad: int
    optim_state: int


@dataclass(frozen=True)
class Candidate:
    """A placement that might do, and its sizes as Placement names them."""

    split: Split
    headroom: Headroom
    gathered_slots: int
    grad_slots: int
    buffers: int
    host_bytes: int
    disk_bytes: int
    shard_slots: int
    bucket_slots: int
    receive_slots: int
    pool_bytes: int
    device_bytes: int
    staged_slots: int
    grad_offload_bytes: int
    buffer_bytes: int  # of one


@dataclass(frozen=True)
class _Ranked:
    """The chunks that are not on DEVICE, in the order in which they go to RAM, and sums of slots.

    Chunks of few slots go first: they fill what is left of the budget best. Of those with as many,
    however many are in RAM are spread over the model: so the disk, which fetches only some chunks
    ahead of compute, is busy all the time and not just in one part of forward.
    """

    chunks: tuple[Chunk, ...]
    slots: tuple[int, ...]  # of the first k
    trained_slots: tuple[int, ...]  # of the first k, trained ones alone
    trained: int  # so many first chunks contain all trained ones
    longest: int
    longest_trained: int

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> _Ranked:
        ranked = tuple(sorted(chunks, key=lambda c: (c.slots, _spread(c.id))))
        trained = [rank + 1 for rank, chunk in enumerate(ranked) if chunk.trainable]
        return cls(
            ranked,
            tuple(accumulate((c.slots for c in ranked), initial=0)),
            tuple(accumulate((c.slots if c.trainable else 0 for c in ranked), initial=0)),
            max(trained, default=0),
            max((c.slots for c in ranked), default=0),
            max((c.slots for c in ranked if c.trainable), default=0),
        )


def _spread(number: int) -> int:
    """A key by which any first ones of 0, 1, 2, ... are evenly spread: the bits in reverse."""
    return int(f"{number:032b}"[::-1], 2)


class Maker:
    """Makes placements in which some chunks are on DEVICE, of the others some of each kind of state
    in RAM, and the rest on DISK.
    """

    def __init__(
        self,
        layout: Layout,
        dtypes: Dtypes,
        policy: str,
        budgets: Budgets,
        min_gathered: int,
        held: bool = False,
    ) -> None:
        """As place() takes them."""
        self.layout = layout
        self.slot = SlotBytes.of(layout, dtypes)
        self.policy = policy
        self.budgets = budgets
        self._host = budgets.host - budgets.taken_host - budgets.reserved_host
        self._device = None if budgets.device is None else budgets.device - budgets.taken_device
        self._min_gathered = min_gathered
        # Frozen chunks first: on DEVICE they take a fraction of the room, and save as many fetches.
        self._to_device = sorted(layout.chunks, key=lambda c: (c.trainable, c.slots, _spread(c.id)))
        self._ranked_without = lru_cache(maxsize=64)(self._rank)
        trained = [c for c in layout.chunks if c.trainable]
        frozen = len(layout.chunks) - len(trained)
        self._most_on_device = len(layout.chunks) if dtypes.device_updates else frozen
        self._longest_trained = max((c.slots for c in trained), default=0)
        numels = [s.param.numel for c in trained for s in c.slices]
        self._drained_bytes = max(numels, default=0) * dtypes.param_bytes
        self._link_bytes = 0 if self._device is None else link_bytes(layout, dtypes)
        self._held_slots = sum(c.slots for c in trained) if held else None
        self._several = layout.shard.ranks * layout.shard.replicas > 1

    @property
    def separate(self) -> bool:
        """Whether DEVICE has memory of its own."""
        return self._device is not None

    @property
    def headrooms(self) -> Sequence[Headroom]:
        """Those that make a difference where everything is in RAM."""
        return HEADROOMS if self._several or self.separate else HEADROOMS[-1:]

    def ranked(self, device: int) -> Sequence[Chunk]:
        """The chunks that are not among the first `device` on DEVICE, in order."""
        return self._ranked_without(device).chunks

    def candidates(self) -> Iterable[Candidate]:
        """From what usually is the fastest to the smallest, each using what the budget leaves.

        What every rank has whole is in RAM: only shards are worth a way to the disk.
        """
        return (candidate for candidate in self._all_candidates() if self.allows(candidate.split))

    def allows(self, split: Split) -> bool:
        """Whether the shards allow it."""
        rest, shard = self._ranked_without(split.device), self.layout.shard
        return (shard.params or split.param == len(rest.chunks)) and (
            shard.grads or split.grad >= rest.trained
        )

    def device_counts(self, headroom: Headroom) -> tuple[int, int]:
        """The least and the most chunks that the policy has on DEVICE, as far as there is room."""
        everything = len(self.layout.chunks)
        if self.policy == "cuda":
            return everything, everything
        if not self.separate or self.policy != "auto":
            return 0, 0
        assert self._device is not None

        def device_bytes(count: int) -> int:
            n = len(self._ranked_without(count).chunks)
            return self.candidate(Split(count, n, n, n), headroom).device_bytes

        # With everything there no slots are needed: more chunks may take less.
        if self._most_on_device == everything and device_bytes(everything) <= self._device:
            return 0, everything
        some = range(1, min(everything, self._most_on_device + 1))
        return 0, bisect_right(some, self._device, key=device_bytes)

    def _all_candidates(self) -> Iterable[Candidate]:
        if self.policy in ("cpu", "auto", "cuda"):
            for headroom in self.headrooms:
                for device in self._device_choices(headroom):
                    n = len(self.ranked(device))
                    yield self.candidate(Split(device, n, n, n), headroom)
        if self.policy in ("nvme", "auto"):
            for least in (1, 1), (1, 0), (0, 0):
                for headroom in HEADROOMS:
                    for device in self._device_choices(headroom):
                        n = len(self.ranked(device))
                        yield self.filled(device, least[0] * n, least[1] * n, headroom)
            yield from self._frugal()

    def _device_choices(self, headroom: Headroom) -> Sequence[int]:
        least, most = self.device_counts(headroom)
        return (most, least) if most > least else (most,)

    def _frugal(self) -> Iterable[Candidate]:
        """Placements of which one needs the least RAM of all.

        RAM per kind of state grows with the chunks in it, but falls where a pool becomes needless:
        when all trained chunks are in, or all chunks.
        """
        for device in self._device_choices(HEADROOMS[-1]):
            rest = self._ranked_without(device)
            n = len(rest.chunks)
            optim_states = (0, rest.trained) if self.policy == "auto" else (0,)
            for in_ram in product((n, rest.trained, 0), (rest.trained, 0), optim_states):
                yield self.candidate(Split(device, *in_ram), HEADROOMS[-1])

    def filled(self, device: int, param: int, grad: int, headroom: Headroom) -> Candidate:
        """At least `param` and `grad` chunks in RAM, then as many of each kind of state as fit."""
        in_ram = [param, grad, 0]
        for state_kind in range(3 if self.policy == "auto" else 2):

            def host_bytes(count: int, state_kind: int = state_kind) -> int:
                counts = (*in_ram[:state_kind], count, *in_ram[state_kind + 1 :])
                return self.candidate(Split(device, *counts), headroom).host_bytes

            more = range(in_ram[state_kind] + 1, len(self.ranked(device)) + 1)
            in_ram[state_kind] += bisect_right(more, self._host, key=host_bytes)
        return self.with_more_buffers(self.candidate(Split(device, *in_ram), headroom))

    def with_optim_states(
        self, device: int, param: int, grad: int, headroom: Headroom, homes: bool = True
    ) -> Candidate:
        """Just `param` and `grad` chunks in RAM, and as many optimizer states as fit: at home
        there, or in buffers alone.
        """

        def host_bytes(count: int) -> int:
            return self.candidate(Split(device, param, grad, count), headroom).host_bytes

        optim_state = 0
        if self.policy != "nvme" and homes:
            more = range(1, len(self.ranked(device)) + 1)
            optim_state = bisect_right(more, self._host, key=host_bytes)
        return self.with_more_buffers(
            self.candidate(Split(device, param, grad, optim_state), headroom)
        )

    def with_more_buffers(self, candidate: Candidate) -> Candidate:
        """RAM that is left keeps optimizer states between steps, in more buffers."""
        if not candidate.buffers or not self.budgets.keep_optim_states:
            return candidate
        rest, optim_state = (
            self._ranked_without(candidate.split.device),
            candidate.split.optim_state,
        )
        streamed = rest.trained_slots[-1] - rest.trained_slots[optim_state]
        spare = (self._host - candidate.host_bytes) // candidate.buffer_bytes
        more = max(0, min(streamed - candidate.buffers, spare))
        return replace(
            candidate,
            buffers=candidate.buffers + more,
            host_bytes=candidate.host_bytes + more * candidate.buffer_bytes,
            pool_bytes=candidate.pool_bytes + more * candidate.buffer_bytes,
        )

    def candidate(self, split: Split, headroom: Headroom) -> Candidate:
        """The pools that `split` needs, and the bytes of it all."""
        rest, slot, shard = self._ranked_without(split.device), self.slot, self.layout.shard
        buffers, more_gathered, more_grad = headroom
        param_on_disk = split.param < len(rest.chunks)
        trained_param_on_disk = split.param < rest.trained
        grad_on_disk = split.grad < rest.trained
        optim_state_on_disk = split.optim_state < rest.trained
        several = shard.ranks > 1
        elsewhere = several and shard.params
        averaged = self._several and self._longest_trained > 0
        in_ram = rest.slots[split.param] * slot.param
        in_ram += rest.trained_slots[split.grad] * slot.grad
        in_ram += rest.trained_slots[split.optim_state] * slot.optim_state
        homed = rest.slots[-1] * slot.param + rest.trained_slots[-1] * (
            slot.grad + slot.optim_state
        )

        gathers = param_on_disk or elsewhere or (self.separate and bool(rest.chunks))
        gathered_slots = self._min_gathered + more_gathered if gathers else 0
        on_the_way = param_on_disk and (several or self.separate)
        shard_slots = rest.longest + more_gathered if on_the_way else 0
        # Also shards at home on DEVICE are gathered in RAM.
        staged = self.separate and elsewhere
        staged_slots = self._ranked_without(0).longest + more_gathered if staged else 0
        grad_slots = rest.longest_trained + more_grad if grad_on_disk else 0
        bucket_slots = receive_slots = 0
        if averaged:
            receive_slots = self._longest_trained * (2 if more_grad else 1)
            if shard.grads:
                bucket_slots = self._held_slots or self._longest_trained + more_gathered
        if not (trained_param_on_disk or grad_on_disk or optim_state_on_disk):
            buffers = 0
        buffer_bytes = slot.optim_state
        buffer_bytes += slot.param if trained_param_on_disk else 0
        buffer_bytes += slot.grad if grad_on_disk else 0

        pools = grad_slots * slot.grad + shard_slots * slot.param + staged_slots * slot.gathered
        pools += self._link_bytes
        pools += (bucket_slots + receive_slots) * slot.bucket + buffers * buffer_bytes
        if averaged and shard.replicas > 1:
            pools += self._longest_trained * slot.bucket // shard.ranks
        device_bytes = grad_offload_bytes = 0
        if self._device is None:
            pools += gathered_slots * slot.gathered
        else:
            everything = self._ranked_without(0)
            device_bytes = (everything.slots[-1] - rest.slots[-1]) * slot.param
            trained = everything.trained_slots[-1] - rest.trained_slots[-1]
            device_bytes += trained * (slot.grad + slot.optim_state)
            if rest.trained:
                grad_offload_bytes = self._drained_bytes * (2 if more_gathered else 1)
            device_bytes += grad_offload_bytes + gathered_slots * slot.gathered
            # More slots on DEVICE only save fetches: they take nothing from anything else.
            all_slots = (everything if elsewhere else rest).slots[-1]
            spare = (self._device - device_bytes) // slot.gathered
            more = max(0, min(all_slots - gathered_slots, spare)) if gathers else 0
            gathered_slots += more
            device_bytes += more * slot.gathered
        return Candidate(
            split=split,
            headroom=headroom,
            gathered_slots=gathered_slots,
            grad_slots=grad_slots,
            buffers=buffers,
            host_bytes=in_ram + pools,
            disk_bytes=homed - in_ram,
            shard_slots=shard_slots,
            bucket_slots=bucket_slots,
            receive_slots=receive_slots,
            pool_bytes=pools,
            device_bytes=device_bytes,
            staged_slots=staged_slots,
            grad_offload_bytes=grad_offload_bytes,
            buffer_bytes=buffer_bytes,
        )

    def placement(self, candidate: Candidate) -> Placement:
        """The placement that `candidate` is, without what construction needs."""
        rest, split = self._ranked_without(candidate.split.device), candidate.split
        n = len(self.layout.chunks)

        def homes(count: int, only_trained: bool) -> tuple[Tier | None, ...]:
            made: list[Tier | None] = [Tier.DEVICE] * n
            for rank, chunk in enumerate(rest.chunks):
                made[chunk.id] = Tier.HOST if rank < count else Tier.DISK
            if only_trained:
                for chunk in self.layout.chunks:
                    if not chunk.trainable:
                        made[chunk.id] = None
            return tuple(made)

        return Placement(
            param=tuple(tier for tier in homes(split.param, False) if tier is not None),
            grad=homes(split.grad, True),
            optim_state=homes(split.optim_state, True),
            gathered_slots=candidate.gathered_slots,
            grad_slots=candidate.grad_slots,
            buffers=candidate.buffers,
            host_bytes=candidate.host_bytes,
            disk_bytes=candidate.disk_bytes,
            shard_slots=candidate.shard_slots,
            bucket_slots=candidate.bucket_slots,
            receive_slots=candidate.receive_slots,
            longest_trained=self._longest_trained,
            pool_bytes=candidate.pool_bytes,
            device_bytes=candidate.device_bytes,
            staged_slots=candidate.staged_slots,
            grad_offload_bytes=candidate.grad_offload_bytes,
        )

    def checked(self, made: Placement) -> Placement | None:
        """`made` with what construction takes, if it fits the budgets."""
        budgets = self.budgets
        made, total = self._with_construction(made)
        if total.host_bytes > budgets.host or total.disk_bytes > budgets.disk:
            return None
        if budgets.device is not None and total.device_bytes > budgets.device:
            return None
        gathered = budgets.taken_gathered + made.gathered_slots * self.slot.gathered
        if budgets.gathered is not None and gathered > budgets.gathered:
            return None
        return made

    def fits(self, candidate: Candidate) -> bool:
        """Whether it fits the budgets, once it is built; quicker than checked()."""
        budgets = self.budgets
        gathered = budgets.taken_gathered + candidate.gathered_slots * self.slot.gathered
        return (
            candidate.host_bytes <= self._host
            and budgets.taken_disk + candidate.disk_bytes <= budgets.disk
            and (self._device is None or candidate.device_bytes <= self._device)
            and (budgets.gathered is None or gathered <= budgets.gathered)
        )

    def refusal(self) -> PlacementError:
        """Why no candidate fits, with the smallest budgets that work."""
        tried = [self._with_construction(self.placement(c))[1] for c in self.candidates()]
        smallest = closest(tried, self.budgets)
        message = words(smallest, self.budgets, self.slot, self.policy, self.layout)
        return PlacementError(message, smallest.host_bytes, smallest.device_bytes)

    def _with_construction(self, made: Placement) -> tuple[Placement, Placement]:
        """`made` with what construction takes, and together with what other chunk groups have."""
        budgets = self.budgets
        building = 0
        if budgets.under_construction:
            building = _building_bytes(
                self.layout, self.slot, made, budgets.disk > 0, self._link_bytes
            )
        made = replace(made, host_bytes=max(made.host_bytes, building))
        total = replace(
            made,
            host_bytes=budgets.taken_host
            + budgets.reserved_host
            + max(made.host_bytes, building + budgets.waiting),
            disk_bytes=budgets.taken_disk + made.disk_bytes,
            device_bytes=budgets.taken_device + made.device_bytes,
        )
        return made, total

    def _rank(self, device: int) -> _Ranked:
        return _Ranked.of(self._to_device[device:])


def _building_bytes(
    layout: Layout, slot: SlotBytes, made: Placement, disk: bool, link_bytes: int
) -> int:
    """The most RAM while chunks are made, one by one, from fp32 parameters.

    Of several ranks each keeps its part of the parameters that wait; with a disk they wait there,
    all but the largest, or, of several ranks, the part of a chunk that is being made. Pools are
    there from the start if there are several ranks, and the `link_bytes`, gradients not yet.
    """
    shard = layout.shard
    params = [[s.param.numel * CONSTRUCTION_BYTES for s in c.slices] for c in layout.chunks]
    largest = max(map(max, params))
    alone = shard.ranks * shard.replicas == 1
    if disk and alone:
        return largest
    waiting = 0 if disk else sum(map(sum, params)) // shard.ranks
    bytes_now = link_bytes if alone else made.pool_bytes
    most = 0
    for chunk, sizes in zip(layout.chunks, params, strict=True):
        # Rounding up, and what is sent and received at a time.
        fetched = 0 if alone else (sum(sizes) + max(sizes)) // shard.ranks + 64 * len(sizes)
        for tier, slot_bytes in (
            (made.param[chunk.id], slot.param),
            (made.optim_state[chunk.id], slot.optim_state),
        ):
            bytes_now += chunk.slots * slot_bytes if tier is Tier.HOST else 0
        most = max(most, bytes_now + waiting + fetched)
        waiting -= 0 if disk else sum(sizes) // shard.ranks
    return max(most, 0 if alone else largest)
