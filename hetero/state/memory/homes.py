"""Homes, where chunks keep one state kind between steps, and slots for copies and buffers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import torch

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Chunk, Layout
from hetero.planning.placement import Placement, SlotBytes
from hetero.state.memory.scratch_space import ScratchSpace
from offload._native import Location, StepPipeline
from offload.device.backend import Backend
from offload.disk.scratch_file import Extent
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.sizes import PAGE_BYTES, round_up
from offload.memory.tiers import Account, StateKind, Tier

_FILE_ORDER = (StateKind.OPTIM_STATE, StateKind.PARAM, StateKind.GRAD)  # within a chunk


class ExtentSize(NamedTuple):
    """Bytes that an extent takes in the file, and those that a transfer of it moves."""

    space_bytes: int
    transfer_bytes: int


class FileMap(NamedTuple):
    """The extents of this rank's shards in one file, as they are at first.

    All begin at multiples of PAGE_BYTES. Those of PARAM and GRAD are one transfer, up to the last
    used page (with several ranks all of the shard); those of OPTIM_STATE are one tile after the
    other. When homes move, extents come and go, wherever the file has room.

    Attributes:
        extents: by state kind and chunk id.
        nbytes: length of the file.
    """

    extents: dict[StateKind, dict[int, Extent]]
    nbytes: int


def extent_size(layout: Layout, dtypes: Dtypes, state_kind: StateKind, chunk: Chunk) -> ExtentSize:
    """The size of the extent of one state kind of `chunk`."""
    space_bytes = chunk.slots * int(getattr(SlotBytes.of(layout, dtypes), state_kind.value))
    if state_kind is StateKind.OPTIM_STATE or layout.shard.ranks > 1:
        return ExtentSize(space_bytes, space_bytes)
    itemsize = dtypes.param_bytes if state_kind is StateKind.PARAM else dtypes.grad_bytes
    return ExtentSize(space_bytes, round_up(chunk.used_numel * itemsize, PAGE_BYTES))


def map_file(layout: Layout, placement: Placement, dtypes: Dtypes) -> FileMap:
    """Lays out one after the other what `placement` puts on DISK, chunk by chunk."""
    extents: dict[StateKind, dict[int, Extent]] = {state_kind: {} for state_kind in StateKind}
    end = 0
    for chunk in layout.chunks:
        for state_kind in _FILE_ORDER:
            if getattr(placement, state_kind.value)[chunk.id] is Tier.DISK:
                size = extent_size(layout, dtypes, state_kind, chunk)
                extents[state_kind][chunk.id] = Extent(end, size.transfer_bytes, chunk.slots)
                end += size.space_bytes
    return FileMap(extents, end)


def name_of(kind: StateKind, chunk: Chunk) -> str:
    """What an extent has, for errors: the chunk, by the names of its parameters."""
    what = {StateKind.PARAM: "parameters", StateKind.OPTIM_STATE: "optimizer state"}
    names = list_names([s.param.name for s in chunk.slices])
    return f"{what.get(kind, 'gradients')} of chunk {chunk.id} ({names})"


def list_names(names: Sequence[str]) -> str:
    """The first ones, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


@dataclass(frozen=True)
class _Run:
    """`slots` slots of an arena, from slot `first`."""

    tier: Tier
    arena: HostArena
    first: int
    slots: int

    def commit(self) -> None:
        """Charges the slots. Raises BudgetError."""
        self.arena.commit(self.first, self.slots)


@dataclass(eq=False)
class _Home:
    """The home of one chunk.

    Attributes:
        run: None: it is on DISK, or the chunk has none.
        first_run: in the arena of the chunks that began in RAM, for a return; None of others.
        second: where it is going to be, while it moves.
        flat: what flat() gave, until release_view().
        is_resident: whether compute uses it in place, because all of the chunk is there.
    """

    run: _Run | None = None
    first_run: _Run | None = None
    second: _Run | None = None
    flat: torch.Tensor | None = None
    is_resident: bool = False


class Homes:
    """The homes of one state kind: slots for chunks on HOST or DEVICE, extents for those on DISK.

    A chunk is `in` it if its home is in memory. Slots are charged when they are first used. A home
    moves in three steps: allocate() makes a second home on another tier, the caller copies, and
    switch() makes it the chunk's home and frees the old one. free() leaves the chunk without a home
    in memory.

    The chunks that begin in RAM are in one arena, whose slots they keep for a return. Each of the
    others has an arena of its own, and so have all on DEVICE, because some devices give memory back
    as a whole.

    Attributes:
        extents: of this rank's shards on DISK, by chunk id. Those who move homes change it.
        whole: a slot holds a slot of the whole chunk, of which this rank's shard is a part; else it
            holds one tile of the shard. For a single rank the two are the same.
    """

    def __init__(
        self,
        layout: Layout,
        dtypes: Dtypes,
        state_kind: StateKind,
        tiers: Sequence[Tier | None],
        extents: dict[int, Extent],
        ledger: Ledger,
        backend: Backend,
    ) -> None:
        """Maps the memory of all homes, whose `tiers` are by chunk id (None: it has no home).

        Those on DEVICE are charged at once. Raises BudgetError if it has no room.
        """
        self._shard = shard = layout.shard
        self._dtype, sharded = {
            StateKind.PARAM: (dtypes.torch_compute, shard.params),
            StateKind.GRAD: (dtypes.torch_grad, shard.grads),
            StateKind.OPTIM_STATE: (torch.uint8, True),
        }[state_kind]
        self.whole = not sharded or shard.ranks == 1
        self.extents = extents
        slot_bytes: int = getattr(SlotBytes.of(layout, dtypes), state_kind.value)
        self._tile_bytes = shard.numel(slot_bytes) if self.whole else slot_bytes
        self._backend = backend
        self._compute_tier = Tier.DEVICE if backend.separate else Tier.HOST
        account = Account[state_kind.name]
        # A device copies by itself from all arenas but those of optimizer state.
        is_copied = state_kind is not StateKind.OPTIM_STATE
        make: Callable[..., HostArena] = backend.host_arena if is_copied else HostArena
        self._arena: Mapping[Tier, Callable[[int], HostArena]] = {
            Tier.HOST: lambda slots: make(slots, slot_bytes, ledger, account),
            Tier.DEVICE: lambda slots: backend.arena(slots, slot_bytes, ledger, account),
        }
        self._homes = [_Home() for _ in layout.chunks]
        in_ram = [c for c in layout.chunks if tiers[c.id] is Tier.HOST]
        self._common = self._arena[Tier.HOST](sum(c.slots for c in in_ram))
        first = 0
        for chunk in in_ram:
            run = _Run(Tier.HOST, self._common, first, chunk.slots)
            self._homes[chunk.id].first_run = run
            self._move(chunk, run)
            first += chunk.slots
        try:
            for chunk in layout.chunks:
                if tiers[chunk.id] is Tier.DEVICE:
                    self._move(chunk, self._own(chunk, Tier.DEVICE))
        except BaseException:
            self.close()
            raise

    def _own(self, chunk: Chunk, tier: Tier) -> _Run:
        """Slots in an arena of its own."""
        return _Run(tier, self._arena[tier](chunk.slots), 0, chunk.slots)

    def _move(self, chunk: Chunk, run: _Run | None) -> None:
        """The chunk has its home there from now on."""
        home = self._homes[chunk.id]
        home.run = run
        home.is_resident = self.whole and self.on_compute_tier(chunk)

    def _run(self, chunk: Chunk) -> _Run:
        """The slots of a chunk that has its home in memory."""
        run = self._homes[chunk.id].run
        assert run is not None
        return run

    def __contains__(self, chunk: Chunk) -> bool:
        return self._homes[chunk.id].run is not None

    def on_compute_tier(self, chunk: Chunk) -> bool:
        """Whether the chunk's home is where compute happens."""
        run = self._homes[chunk.id].run
        return run is not None and run.tier is self._compute_tier

    def on_device(self, chunk: Chunk) -> bool:
        """Whether the chunk's home is on a DEVICE that has memory of its own."""
        return self._backend.separate and self.on_compute_tier(chunk)

    def is_resident(self, chunk: Chunk) -> bool:
        """Whether the whole chunk's home is where compute happens, which uses it in place."""
        return self._homes[chunk.id].is_resident

    def commit_all(self) -> None:
        """Charges all slots that are not charged yet. Raises BudgetError."""
        for home in self._homes:
            if home.run is not None:
                home.run.commit()

    def flat(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's slots as one flat tensor, a pin of the home. Raises BudgetError.

        It is the same tensor object until release_view(). It is the whole chunk if homes are
        `whole`, else this rank's shard.
        """
        home = self._homes[chunk.id]
        if home.flat is None:
            run = self._run(chunk)
            run.commit()
            with torch.inference_mode(False):  # which may be on where an update is waited for
                home.flat = run.arena.view(run.first, run.slots, self._dtype, pinned=True)
        return home.flat

    def resident(self, chunk: Chunk) -> torch.Tensor | None:
        """A resident chunk's home, flat, whether its values are there or not; None for others."""
        return self.flat(chunk) if self._homes[chunk.id].is_resident else None

    def shard(self, chunk: Chunk) -> torch.Tensor:
        """This rank's shard of the chunk, flat."""
        flat = self.flat(chunk)
        return flat[self._shard.range(flat.numel())] if self.whole else flat

    def address(self, chunk: Chunk, tile: int) -> int:
        """The address of tile number `tile` of this rank's shard."""
        run = self._run(chunk)
        if self.whole:
            tile += self._shard.rank * chunk.slots
        return run.arena.address(run.first) + tile * self._tile_bytes

    def locations(self, chunk: Chunk) -> list[Location]:
        """The places of the tiles of this rank's shard, in memory or in the file."""
        in_file = self._homes[chunk.id].run is None
        first = self.extents[chunk.id].offset if in_file else self.address(chunk, 0)
        places = range(first, first + chunk.slots * self._tile_bytes, self._tile_bytes)
        return [*map(Location, repeat(0), places)] if in_file else [*map(Location, places)]

    # Moving

    def bytes(self, chunk: Chunk, second: bool = False) -> torch.Tensor:
        """The bytes of the chunk's home, or of its second home, flat.

        The tensor is no pin: it must not outlive the move that it is for.
        """
        home = self._homes[chunk.id]
        run = home.second if second else home.run
        assert run is not None
        run.commit()
        return run.arena.view(run.first, run.slots, torch.uint8)

    def release_view(self, chunk: Chunk, collect: bool = True) -> bool:
        """Drops the tensor that flat() gave; returns whether no other one views the home.

        `collect`: those do not count that only reference cycles hold; to find them takes long.
        """
        self._homes[chunk.id].flat = None
        run = self._run(chunk)
        if collect and run.arena.pins[run.first]:
            gc.collect()  # the frames of an exception, say
        return not run.arena.pins[run.first]

    def free(self, chunk: Chunk) -> None:
        """Frees the chunk's home, with its bytes. release_view() must have returned True."""
        run = self._run(chunk)
        self._move(chunk, None)
        assert not run.arena.pins[run.first]
        self._release(run)

    def _release(self, run: _Run) -> None:
        if run.arena is self._common:
            run.arena.decommit(run.first, run.slots)
        else:
            run.arena.close()

    def allocate(self, chunk: Chunk, tier: Tier) -> None:
        """Makes a second home on `tier`, with undefined bytes. Raises BudgetError."""
        home = self._homes[chunk.id]
        assert home.second is None
        returns = home.first_run is not None and tier is Tier.HOST
        run = home.first_run if returns else self._own(chunk, tier)
        assert run is not None
        assert run is not home.run
        try:
            run.commit()
        except BaseException:
            if not returns:
                run.arena.close()
            raise
        home.second = run

    def switch(self, chunk: Chunk) -> None:
        """Makes the second home the chunk's home; frees the one that it had, if any."""
        if chunk in self:
            self.free(chunk)
        home = self._homes[chunk.id]
        assert home.second is not None
        self._move(chunk, home.second)
        home.second = None

    def free_second(self, chunk: Chunk) -> None:
        """Frees the second home, if there is one."""
        home = self._homes[chunk.id]
        run, home.second = home.second, None
        if run is not None:
            self._release(run)

    def close(self) -> None:
        """Frees all homes; the memory goes when the last tensor over it does."""
        for home in self._homes:
            home.flat = None
            for run in (home.run, home.second):
                if run is not None:
                    run.arena.close()
            home.run = home.second = None
            home.is_resident = False
        self._common.close()


class SlotArenas:
    """A chunk group's slots for copies and buffers: one arena per purpose, and the step pipeline.

    The arenas have slots after allocate(). Between steps, when no slot is in use, free() and
    allocate() change their sizes.

    Attributes:
        pipeline: the step pipeline over `buffers`; another one after each allocate().
        is_reading_ahead: whether the pipeline reads ahead, or has read, what the next step needs.
    """

    pipeline: StepPipeline

    def __init__(
        self,
        layout: Layout,
        dtypes: Dtypes,
        backend: Backend,
        ledger: Ledger,
        file: ScratchSpace,
        resources: ExitStack,
    ) -> None:
        """Makes arenas without slots, which `resources` close."""
        self._layout, self._dtypes = layout, dtypes
        self._slot = SlotBytes.of(layout, dtypes)
        self._separate = backend.separate
        self._file = file

        def arena(account: Account, linked: bool = True) -> HostArena:
            """`linked`: a device copies from it and to it."""
            make = backend.host_arena if linked else HostArena
            made = make(0, 1, ledger, account)
            resources.callback(made.close)
            return made

        self.staged = arena(Account.GATHERED)  # RAM, on the way to DEVICE
        self.shards = arena(Account.SHARD)
        self.grads = arena(Account.GRAD_SLOT)
        self.buffers = arena(Account.BUFFER, linked=False)
        # Where compute happens.
        self.gathered = backend.arena(0, self._slot.gathered, ledger, Account.GATHERED)
        resources.callback(self.gathered.close)
        # There, too: what devices gather and this rank does not keep there.
        self.unkept = backend.arena(0, self._slot.gathered, ledger, Account.GATHERED)
        resources.callback(self.unkept.close)
        self.is_reading_ahead = False
        resources.callback(self._close_pipeline)

    def _close_pipeline(self) -> None:
        if hasattr(self, "pipeline"):
            self.pipeline.close()

    def allocate(self, placement: Placement, spare_bytes: int) -> None:
        """Gives the arenas the numbers of slots that `placement` says, and makes a new pipeline.

        `spare_bytes` is RAM that no plan counts on. With several ranks as many slots for gathered
        parameters as fit there may be used while it is free. Raises BudgetError.
        """
        made, slot = placement, self._slot
        spare_slots = 0
        if self._layout.shard.ranks > 1 and made.gathered_slots and not self._separate:
            spare_slots = min(self._layout.slot_count, max(0, spare_bytes) // slot.gathered)
        self.resize_gathered(made.gathered_slots, spare_slots)
        shape = (
            self._dtypes.kind,
            self._layout.tile_numel,
            made.trained_param_on_disk,
            Tier.DISK in made.grad,
        )
        for arena, slots, nbytes in (
            (self.staged, made.staged_slots, slot.gathered),
            (self.unkept, made.unkept_slots, slot.gathered),
            (self.shards, made.shard_slots, slot.param),
            (self.grads, made.grad_slots, slot.grad),
            (self.buffers, made.buffers, StepPipeline.buffer_bytes(*shape)),
        ):
            arena.resize(slots, nbytes)
            arena.commit(0, slots)
        self._register()
        disk = self._file.parts
        self.pipeline = StepPipeline(
            # Frozen parameters alone on DISK need no buffers, and so no I/O engine.
            disk.io if disk is not None and made.buffers else None,
            disk.transfers.file if disk is not None else -1,
            self.buffers.memory if made.buffers else None,
            made.buffers,
            *shape,
        )
        self.is_reading_ahead = False

    def expect(
        self, expected: Sequence[tuple[int, Location, Location, int]], streaming: int
    ) -> None:
        """The pipeline reads ahead what updates to come will find in the file (StepPipeline)."""
        self.is_reading_ahead = bool(expected)
        self.pipeline.expect(expected, streaming)

    def forget_read_ahead(self) -> None:
        """Frees the pipeline's buffers of what they have read, or keep, for the next step.

        What the file lacks is written first.
        """
        self.pipeline.forget()
        self.is_reading_ahead = False

    def resize_gathered(self, slots: int, spare_slots: int = 0) -> None:
        """Gives `gathered` other numbers of slots; none may be in use. Raises BudgetError.

        `slots` are charged at once, `spare_slots`, beside them, while they are used.
        """
        self.gathered.resize(slots + spare_slots)
        self.gathered.commit(0, slots)

    def resize_unkept(self, slots: int) -> None:
        """Gives `unkept` another number of slots; none may be in use. Raises BudgetError."""
        self.unkept.resize(slots, self._slot.gathered)
        self.unkept.commit(0, slots)

    def free(self) -> None:
        """Frees all slots and closes the pipeline.

        No slot may be in use, and the pipeline may have nothing that the file lacks.
        """
        self._close_pipeline()
        disk = self._file.parts
        made = self.staged, self.shards, self.grads, self.buffers
        for arena in (self.gathered, self.unkept, *made):
            if disk is not None and arena.slots and arena.tier is Tier.HOST:
                disk.io.unregister(arena.memory)
            arena.resize(0)

    def _register(self) -> None:
        """Registers what is read from the file and written to it with the I/O engine."""
        disk = self._file.parts
        if disk is None:
            return
        params = self.gathered if self.read_in_place else self.shards
        for arena in (params, self.grads, self.buffers):
            if arena.slots and not disk.io.register(arena.memory):
                self._file.note(disk.io.notes)

    @property
    def read_in_place(self) -> bool:
        """Whether a shard is a whole chunk and is read from the file to where compute uses it."""
        return self._layout.shard.ranks == 1 and not self._separate
