"""The memory and the file of a chunk group: homes, where chunks keep their state between steps, and
slots for copies and buffers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import torch

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Chunk, Layout
from hetero.config import Config
from hetero.planning.group_plans import ChunkGroupPlan
from hetero.planning.placement import Placement, SlotBytes
from hetero.state.state_files import StateFiles
from offload._native import IoEngine, IoOp, Location, StepPipeline
from offload.cache.slot_cache import Transfers
from offload.device.backend import Backend
from offload.disk.scratch_file import Extent, ScratchFile, checksum_bytes, make_io_engine
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.run_pool import FreeSpace
from offload.memory.sizes import PAGE_BYTES, round_up
from offload.memory.tiers import Account, StateKind, Tier

_FILE_ORDER = (StateKind.OPTIM_STATE, StateKind.PARAM, StateKind.GRAD)  # within a chunk


class ExtentSize(NamedTuple):
    """Bytes that an extent takes in the file, and those that a transfer of it moves."""

    space_bytes: int
    transfer_bytes: int


def name_of(kind: StateKind, chunk: Chunk) -> str:
    """What an extent has, for errors: the chunk, by the names of its parameters."""
    what = {StateKind.PARAM: "parameters", StateKind.OPTIM_STATE: "optimizer state"}
    names = list_names([s.param.name for s in chunk.slices])
    return f"{what.get(kind, 'gradients')} of chunk {chunk.id} ({names})"


def list_names(names: Sequence[str]) -> str:
    """The first ones, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


@dataclass
class DiskParts:
    """What a chunk group has only if something of it has, or had, its home on DISK."""

    io: IoEngine
    scratch: ScratchFile
    transfers: Transfers


class ScratchSpace:
    """Allocates extents in one scratch file, and starts transfers with it.

    The file is made at the first allocation and grows when an extent finds no free space. It never
    shrinks, so that space which was reserved once stays the engine's.

    The file of a durable state has a name, and checksums of its pages. What is freed there may be
    the last commit's: it is free for other extents when take_freed() and reuse() have said so.
    """

    account = Account.FILE

    def __init__(
        self,
        config: Config,
        ledger: Ledger,
        notes: list[str],
        resources: ExitStack,
        state_files: StateFiles | None = None,
        number: int = 0,
    ) -> None:
        """Makes no file yet.

        Args:
            config: has the directories.
            ledger: charged for the file.
            notes: lines for the user, to which findings about the disks are appended.
            resources: close the file, its transfers and the I/O engine.
            state_files: of a durable state, the folders and names of its files.
            number: of the chunk group, by which its file is known among those.
        """
        self.parts: DiskParts | None = None
        self._config = config
        self._ledger = ledger
        self.notes = notes
        self._resources = resources.enter_context(ExitStack())
        self._free = FreeSpace()
        self._state_files = state_files
        self._number = number
        self._freed: list[tuple[int, int]] = []  # what the last commit may have
        # What is read is compared with checksums, which the budgets have in them.
        self._is_checked = self._counts_checksums = config.has_checksums
        self.checksum_bytes = 0  # of RAM, that the ledger has been charged for

    @property
    def is_durable(self) -> bool:
        """Whether the file is of a durable state."""
        return self._state_files is not None

    @property
    def is_possible(self) -> bool:
        """Whether there is or can be a file, because there are directories."""
        return bool(self._config.nvme_paths)

    def reserve(self, nbytes: int) -> None:
        """Lets the file grow until `nbytes` are free, for allocations that are to follow.

        Raises BudgetError, StoreError or NativeIoError if there is no room; nothing is changed.
        """
        missing = nbytes - self._free.nbytes
        if missing <= 0:
            return
        if self.parts is None:
            self.parts = self._open(missing)
            self._free.give(0, missing)
        else:
            self._free.give(self._grow(self.parts, missing), missing)

    def allocate(self, nbytes: int) -> int:
        """Allocates `nbytes`, whole pages; returns their offset. Raises as reserve()."""
        if self.parts is None:
            self.reserve(nbytes)
        assert self.parts is not None
        offset = self._free.take(nbytes)
        return self._grow(self.parts, nbytes) if offset is None else offset

    def length_after(self, *batches: Sequence[int]) -> int:
        """How long the file would be after reserve() and allocate() of extents of so many bytes,
        one batch after the other."""
        free, end = FreeSpace(), 0 if self.parts is None else self.parts.scratch.nbytes
        for begin, past in self._free.ranges:
            free.give(begin, past - begin)
        for sizes in batches:
            missing = max(0, sum(sizes) - free.nbytes)
            if missing:
                free.give(end, missing)
                end += missing
            for nbytes in sizes:
                if free.take(nbytes) is None:
                    end += nbytes
        return end

    def _grow(self, parts: DiskParts, nbytes: int) -> int:
        """Makes the file, and the table of its checksums, longer; returns where it did end."""
        with ExitStack() as undone:
            undone.callback(self._charge_checksums(parts.scratch.nbytes + nbytes))
            offset = parts.scratch.reserve(nbytes)
            undone.pop_all()
        if self._counts_checksums:
            parts.io.reserve_checksums(parts.transfers.file, parts.scratch.nbytes)
        return offset

    def _charge_checksums(self, file_bytes: int) -> Callable[[], None]:
        """Charges the RAM of the checksums of a file that becomes so long; returns what undoes it.

        Raises BudgetError.
        """
        before = self.checksum_bytes
        more = max(0, checksum_bytes(file_bytes) - before) if self._counts_checksums else 0
        self._ledger.charge(Tier.HOST, Account.FILE, more)
        self.checksum_bytes += more

        def undo() -> None:
            self._ledger.release(Tier.HOST, Account.FILE, self.checksum_bytes - before)
            self.checksum_bytes = before

        return undo

    def free(self, offset: int, nbytes: int) -> None:
        """Frees what allocate() gave, whole or in part, for other extents."""
        if self._state_files is None:
            self._free.give(offset, nbytes)
        else:
            self._freed.append((offset, nbytes))

    def take_freed(self) -> list[tuple[int, int]]:
        """What was freed since the last call: the commit that begins now does not have it."""
        taken, self._freed = self._freed, []
        return taken

    def reuse(self, freed: Iterable[tuple[int, int]]) -> None:
        """What take_freed() gave is free for other extents: the commit is durable."""
        for offset, nbytes in freed:
            self._free.give(offset, nbytes)

    def name(self, offset: int, nbytes: int, what: str) -> None:
        """Errors of transfers in this part of the file say `what` it has."""
        if self.parts is not None:
            self.parts.io.name_range(self.parts.transfers.file, offset, nbytes, what)

    def _open(self, nbytes: int) -> DiskParts:
        with ExitStack() as resources:
            io, io_notes = self._open_io(resources)
            directories: Sequence[str] = self._config.nvme_paths
            name: str | None = None
            if self._state_files is not None:
                directories = self._state_files.folders
                name = self._state_files.data_name(self._number)
            scratch = ScratchFile(directories, self._ledger, self.account, name)
            resources.callback(scratch.close)
            scratch.deal(nbytes)
            resources.callback(self._charge_checksums(nbytes))
            scratch.reserve(nbytes)
            transfers = Transfers(io, scratch, self._is_checked)
            resources.callback(transfers.close)
            if self._counts_checksums:
                io.reserve_checksums(transfers.file, scratch.nbytes)
            self.note((*scratch.notes, *io_notes))
            self._resources.push(resources.pop_all())
        return DiskParts(io, scratch, transfers)

    def _open_io(self, resources: ExitStack) -> tuple[IoEngine, Sequence[str]]:
        """An I/O engine, which `resources` close, and notes on it."""
        config = self._config
        io, notes = make_io_engine(config.debugging.io_engine, len(config.nvme_paths))
        resources.callback(io.close)
        return io, notes

    def note(self, lines: Iterable[str]) -> None:
        """Appends lines to the notes for the user that are not there yet."""
        self.notes.extend(line for line in lines if line not in self.notes)

    def read(self, address: int, nbytes: int, offset: int, soon: bool = False) -> IoOp:
        """Starts reading file bytes [offset, offset + nbytes) to `address`.

        `soon`: nobody waits for it yet.
        """
        assert self.parts is not None, "nothing is on DISK"
        return self.parts.transfers.read(address, nbytes, offset, soon)

    def write(self, address: int, nbytes: int, offset: int, soon: bool = False) -> IoOp:
        """Starts writing `nbytes` at `address` to the file at `offset`; `soon` as for read()."""
        assert self.parts is not None, "nothing is on DISK"
        return self.parts.transfers.write(address, nbytes, offset, soon)


@dataclass(eq=False)
class _Home:
    """The home of one chunk.

    Attributes:
        arena: its slots; None: it is on DISK, or the chunk has none.
        second: where it is going to be, while it moves.
        flat: what flat() gave, until release_view().
        is_resident: whether compute uses it in place, because all of the chunk is there.
    """

    arena: HostArena | None = None
    second: HostArena | None = None
    flat: torch.Tensor | None = None
    is_resident: bool = False


class Homes:
    """The homes of one state kind: slots for chunks on HOST or DEVICE, extents for those on DISK.

    A chunk is `in` it if its home is in memory, which is an arena of its own, so that each is given
    back as a whole. Slots are charged when they are first used. A home moves in three steps:
    allocate() makes a second home on another tier, the caller copies, and switch() makes it the
    chunk's home and frees the old one. free() leaves the chunk without a home in memory.

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
            StateKind.GRAD: (dtypes.torch_grad, True),
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
        self._make: Mapping[Tier, Callable[[int], HostArena]] = {
            Tier.HOST: lambda slots: make(slots, slot_bytes, ledger, account),
            Tier.DEVICE: lambda slots: backend.arena(slots, slot_bytes, ledger, account),
        }
        self._homes = [_Home() for _ in layout.chunks]
        try:
            for chunk, tier in zip(layout.chunks, tiers, strict=True):
                if tier in self._make:
                    self._move(chunk, self._make[tier](chunk.slots))
        except BaseException:
            self.close()
            raise

    def _move(self, chunk: Chunk, arena: HostArena | None) -> None:
        """The chunk has its home there from now on."""
        home = self._homes[chunk.id]
        home.arena = arena
        home.is_resident = self.whole and self.on_compute_tier(chunk)

    def _arena(self, chunk: Chunk, second: bool = False) -> HostArena:
        """The slots of a chunk that has its home, or a `second` one, in memory."""
        home = self._homes[chunk.id]
        arena = home.second if second else home.arena
        assert arena is not None
        return arena

    def __contains__(self, chunk: Chunk) -> bool:
        return self._homes[chunk.id].arena is not None

    def on_compute_tier(self, chunk: Chunk) -> bool:
        """Whether the chunk's home is where compute happens."""
        arena = self._homes[chunk.id].arena
        return arena is not None and arena.tier is self._compute_tier

    def on_device(self, chunk: Chunk) -> bool:
        """Whether the chunk's home is on a DEVICE that has memory of its own."""
        return self._backend.separate and self.on_compute_tier(chunk)

    def is_resident(self, chunk: Chunk) -> bool:
        """Whether the whole chunk's home is where compute happens, which uses it in place."""
        return self._homes[chunk.id].is_resident

    def commit_all(self) -> None:
        """Charges all slots that are not charged yet. Raises BudgetError."""
        for home in self._homes:
            if home.arena is not None:
                home.arena.commit_all()

    def flat(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's slots as one flat tensor, a pin of the home. Raises BudgetError.

        It is the same tensor object until release_view(). It is the whole chunk if homes are
        `whole`, else this rank's shard.
        """
        home = self._homes[chunk.id]
        if home.flat is None:
            arena = self._arena(chunk)
            arena.commit_all()
            home.flat = arena.view(0, arena.slots, self._dtype, pinned=True)
        return home.flat

    def resident(self, chunk: Chunk) -> torch.Tensor | None:
        """A resident chunk's home, flat, whether its values are there or not; None for others."""
        return self.flat(chunk) if self._homes[chunk.id].is_resident else None

    def shard(self, chunk: Chunk) -> torch.Tensor:
        """This rank's shard of the chunk, flat."""
        flat = self.flat(chunk)
        if not self.whole or self._shard.ranks == 1:
            return flat
        return flat[self._shard.range(flat.numel())]

    def address(self, chunk: Chunk, tile: int) -> int:
        """The address of tile number `tile` of this rank's shard."""
        if self.whole:
            tile += self._shard.rank * chunk.slots
        return self._arena(chunk).address(0) + tile * self._tile_bytes

    def locations(self, chunk: Chunk) -> list[Location]:
        """The places of the tiles of this rank's shard, in memory or in the file."""
        in_file = chunk not in self
        first = self.extents[chunk.id].offset if in_file else self.address(chunk, 0)
        places = range(first, first + chunk.slots * self._tile_bytes, self._tile_bytes)
        return [*map(Location, repeat(0), places)] if in_file else [*map(Location, places)]

    # Moving

    def bytes(self, chunk: Chunk, second: bool = False) -> torch.Tensor:
        """The bytes of the chunk's home, or of its second home, flat.

        The tensor is no pin: it must not outlive the move that it is for.
        """
        arena = self._arena(chunk, second)
        arena.commit_all()
        return arena.view(0, arena.slots, torch.uint8)

    def release_view(self, chunk: Chunk, collect: bool = True) -> bool:
        """Drops the tensor that flat() gave; returns whether no other one views the home.

        `collect`: those do not count that only reference cycles hold; to find them takes long.
        """
        self._homes[chunk.id].flat = None
        pins = self._arena(chunk).pins
        if collect and pins[0]:
            gc.collect()  # the frames of an exception, say
        return not pins[0]

    def free(self, chunk: Chunk) -> None:
        """Frees the chunk's home, with its bytes. release_view() must have returned True."""
        arena = self._arena(chunk)
        self._move(chunk, None)
        assert not arena.pins[0]
        arena.close()

    def allocate(self, chunk: Chunk, tier: Tier) -> None:
        """Makes a second home on `tier`, with undefined bytes. Raises BudgetError."""
        home = self._homes[chunk.id]
        assert home.second is None
        arena = self._make[tier](chunk.slots)
        try:
            arena.commit_all()
        except BaseException:
            arena.close()
            raise
        home.second = arena

    def switch(self, chunk: Chunk) -> None:
        """Makes the second home the chunk's home; frees the one that it had, if any."""
        if chunk in self:
            self.free(chunk)
        self._move(chunk, self._arena(chunk, second=True))
        self._homes[chunk.id].second = None

    def free_second(self, chunk: Chunk) -> None:
        """Frees the second home, if there is one."""
        home = self._homes[chunk.id]
        arena, home.second = home.second, None
        if arena is not None:
            arena.close()

    def close(self) -> None:
        """Frees all homes; the memory goes when the last tensor over it does."""
        for home in self._homes:
            home.flat = None
            for arena in (home.arena, home.second):
                if arena is not None:
                    arena.close()
            home.arena = home.second = None
            home.is_resident = False


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

        def arena(
            make: Callable[..., HostArena], account: Account, slot_bytes: int = 1
        ) -> HostArena:
            return resources.enter_context(closing(make(0, slot_bytes, ledger, account)))

        # A device copies from these and to these.
        self.staged = arena(backend.host_arena, Account.GATHERED)  # RAM, on the way to DEVICE
        self.shards = arena(backend.host_arena, Account.SHARD)
        self.grads = arena(backend.host_arena, Account.GRAD_SLOT)
        self.buffers = arena(HostArena, Account.BUFFER)
        # Where compute happens.
        self.gathered = arena(backend.arena, Account.GATHERED, self._slot.gathered)
        # There, too: what devices gather and this rank does not keep there.
        self.unkept = arena(backend.arena, Account.GATHERED, self._slot.gathered)
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


class StateMemory:
    """The memory and the file that hold this rank's part of a chunk group's state.

    Attributes:
        layout, dtypes: of the chunk group.
        homes: by kind of state.
        scratch_space: the extents on DISK.
        arenas: the slots for copies, and the pipeline over its buffers.
        tile_bytes: bytes of a tile, by kind of state.
    """

    def __init__(
        self,
        plan: ChunkGroupPlan,
        backend: Backend,
        ledger: Ledger,
        file: ScratchSpace,
        resources: ExitStack,
    ) -> None:
        """Takes the homes that `plan` says, which `resources` close; arenas have no slots yet.

        The file has one chunk after the other. Raises as ScratchSpace.reserve() and Homes.
        """
        self.layout, self.dtypes = layout, dtypes = plan.layout, plan.dtypes
        self.scratch_space = file
        self.tile_bytes = {
            StateKind.PARAM: layout.tile_numel * dtypes.param_bytes,
            StateKind.GRAD: layout.tile_numel * dtypes.grad_bytes,
            StateKind.OPTIM_STATE: dtypes.optim_state_bytes(layout.tile_numel),
        }
        tiers = {kind: getattr(plan.placement, kind.value) for kind in StateKind}
        on_disk = [
            (kind, chunk)
            for chunk in layout.chunks
            for kind in _FILE_ORDER
            if tiers[kind][chunk.id] is Tier.DISK
        ]
        file.reserve(sum(self.extent_size(*each).space_bytes for each in on_disk))
        extents: dict[StateKind, dict[int, Extent]] = {kind: {} for kind in StateKind}
        for kind, chunk in on_disk:
            extents[kind][chunk.id] = self.make_extent(kind, chunk)
        self.homes: dict[StateKind, Homes] = {}
        for kind in StateKind:
            homes = Homes(layout, dtypes, kind, tiers[kind], extents[kind], ledger, backend)
            self.homes[kind] = resources.enter_context(closing(homes))
        self.arenas = SlotArenas(layout, dtypes, backend, ledger, file, resources)

    def extent_size(self, kind: StateKind, chunk: Chunk) -> ExtentSize:
        """The size of the extent of one kind of state of `chunk`.

        Extents begin at multiples of PAGE_BYTES. Those of PARAM and GRAD are one transfer, up to
        the last used page (with several ranks all of the shard); those of OPTIM_STATE are one tile
        after the other.
        """
        slot_bytes: int = getattr(SlotBytes.of(self.layout, self.dtypes), kind.value)
        space_bytes = chunk.slots * slot_bytes
        if kind is StateKind.OPTIM_STATE or self.layout.shard.ranks > 1:
            return ExtentSize(space_bytes, space_bytes)
        is_param = kind is StateKind.PARAM
        itemsize = self.dtypes.param_bytes if is_param else self.dtypes.grad_bytes
        return ExtentSize(space_bytes, round_up(chunk.used_numel * itemsize, PAGE_BYTES))

    def make_extent(self, kind: StateKind, chunk: Chunk) -> Extent:
        """Allocates an extent for one kind of a chunk's state. Raises as ScratchSpace.reserve()."""
        size = self.extent_size(kind, chunk)
        return Extent(
            self.allocate(kind, chunk, size.space_bytes), size.transfer_bytes, chunk.slots
        )

    def free_extent(self, kind: StateKind, chunk: Chunk, extent: Extent) -> None:
        """Frees what make_extent() gave."""
        self.scratch_space.free(extent.offset, self.extent_size(kind, chunk).space_bytes)

    def allocate(self, kind: StateKind, chunk: Chunk, nbytes: int) -> int:
        """Allocates part of the file, of which errors say what it has; returns its offset."""
        offset = self.scratch_space.allocate(nbytes)
        self.scratch_space.name(offset, nbytes, name_of(kind, chunk))
        return offset
