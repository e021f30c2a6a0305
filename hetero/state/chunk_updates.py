"""A chunk of a chunk group while it is trained: its members, who uses it, and its update.

The phases of its update, and what leads from one to another (ChunkUpdates has the transitions):

    Open         parameters have their values, and backward may add gradients
                     -> Speculative   speculating(): no more gradients are expected
                     -> Submitted     submit(): step() submits an update that stays
    Speculative  an update is made with a guess of what step() will say
                     -> Open          revoke(), take_back(): a value is used, a gradient changes, or
                                      the guess was wrong
                     -> Submitted     confirm(): step() keeps the update
    Submitted    the update reads the gradient, and writes parameters and optimizer state
                     -> Done          wait_updated()
    Done         the gradient is free and home has the new values, where param.data does not point
                     -> Open          finish()

A phase is a frozen object that has what is known in that phase alone, so no other combination can
be made. Parameters, gradients, optimizer states and the server of other ranks ask ChunkUpdates
before they touch a chunk's memory. When an update is submitted, and whether step() waits for it, is
decided in hetero/runtime/update_schedule.py.

A chunk also has *versions* of its state in the scratch file: the one in use, and one that somebody
needs. An update that must leave what it reads writes to the chunk's spare extents, and these are in
use from then on. So a speculative update can be taken back, and the last commit stays as it is.
There are two extents of each kind and chunk, so one of these at a time.

A speculative update (bf16, Adam) writes 12 bytes an element in place of 10: parameters in RAM
change in place, and their old bits go to the spare extent. So whoever reads them takes the update
back (ChunkUpdates.revoke()). A second version in RAM, which readers would get, costs 2 bytes an
element of all chunks that no budget has, and does not suffice: tensors of the user's that alias a
resident parameter view its home, and must see the step once it is confirmed, so it is the home that
changes. A use also says that another gradient may come, which takes the update back anyway; what
else reads between a gradient and its step is rare (a save, a lone rank's evaluation).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import torch

from hetero.chunks.layout import Chunk
from hetero.overlap import OverlapUpdates
from hetero.state.managed_param import ManagedParam
from hetero.state.memory import Homes, StateMemory
from offload._native import Hyper, NativeIoError
from offload.cache.slot_cache import SharedWriteBackCache
from offload.disk.scratch_file import Extent
from offload.errors import BudgetError, StoreError
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.operation import Operation
from offload.memory.sizes import format_bytes
from offload.memory.tiers import Account, StateKind


@dataclass(frozen=True)
class Open:
    """No update has begun. `is_final`: backward adds no more gradients."""

    is_final: bool = False


@dataclass(frozen=True)
class Speculative:
    """An update of `members` is under way that can be taken back, with these `hypers` of each."""

    members: Sequence[ManagedParam]
    hypers: Sequence[Hyper]


@dataclass(frozen=True)
class Submitted:
    """An update of `members` is under way that stays.

    `is_awaited`: step() waits for it, because something has the chunk's memory in hands.
    """

    members: Sequence[ManagedParam]
    is_awaited: bool


@dataclass(frozen=True)
class Done:
    """The update of `members` is made; is_awaited as before."""

    members: Sequence[ManagedParam]
    is_awaited: bool


@dataclass(eq=False)
class FileVersions:
    """What the scratch file has of a chunk beside the extents in use.

    Attributes:
        spare: by kind the second extent, which updates write that leave what they read.
        leaves_commit: the last commit has what the next update reads, so that must leave it.
        changed: whether the state in use is another one than the last commit has.
        copies: by kind, of what has its home in memory, the offsets of two extents; the last commit
            has the first one, unless none has `copied` it since it has its home in memory.
    """

    spare: dict[StateKind, Extent] = field(default_factory=dict)
    leaves_commit: bool = False
    changed: bool = True
    copies: dict[StateKind, tuple[int, int]] = field(default_factory=dict)
    copied: set[StateKind] = field(default_factory=set)


@dataclass
class UsedCopy:
    """A gathered copy of a chunk, whole and flat, and how many parameters are views of it."""

    copy: torch.Tensor
    params: int = 0


@dataclass(eq=False)
class ChunkState:
    """One chunk, as the comment at the top says.

    Attributes:
        chunk: its size and its place in the layout.
        members: its parameters, in the order of their places.
        first_key: the pipeline's name of its first tile; those of the others follow.
        update: the phase.
        versions: what the scratch file has of it.
        readers: threads that read its memory (ChunkUpdates.reading()).
        was_revoked: an update was taken back in this step.
        first_use: the order of forward's first uses in this step; None before.
        used: the gathered copy that parameters in use are views of.
        whole_gather: the gather of new values from all ranks that is under way.
        arrived: whose gradients have come in this backward, where they are homed on DISK.
    """

    chunk: Chunk
    members: Sequence[ManagedParam]
    first_key: int
    update: Open | Speculative | Submitted | Done = Open()
    versions: FileVersions = field(default_factory=FileVersions)
    readers: int = 0
    was_revoked: bool = False
    first_use: int | None = None
    used: UsedCopy | None = None
    whole_gather: Operation | None = None
    arrived: set[ManagedParam] = field(default_factory=set)

    @property
    def is_under_way(self) -> bool:
        """Whether its parameters do not have the new values of an update that stays yet."""
        return isinstance(self.update, Submitted | Done)

    @property
    def is_awaited(self) -> bool:
        """Whether step() waits for its update: something has its memory in hands."""
        return isinstance(self.update, Submitted | Done) and self.update.is_awaited


def chunk_states(chunks: Sequence[Chunk], members: Sequence[ManagedParam]) -> list[ChunkState]:
    """The states of all chunks of a chunk group, by id; `members` are all of its parameters."""
    by_id: list[list[ManagedParam]] = [[] for _ in chunks]
    for m in sorted(members, key=lambda m: m.slice.offset):
        by_id[m.chunk.id].append(m)
    made, key = list[ChunkState](), 0
    for chunk in chunks:
        made.append(ChunkState(chunk, by_id[chunk.id], key))
        key += chunk.slots
    return made


class Snapshot:
    """Chunks whose state is copied by another thread as it is now, each before it changes.

    That thread takes one chunk after the other; one that somebody waits for comes first.

    Attributes:
        was_told: the failure was raised.
    """

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        """`chunks` are in the order in which they are copied as long as nobody waits."""
        self._pending = dict.fromkeys(chunks)
        self._wanted: dict[Chunk, None] = {}
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self.was_told = False

    def take(self) -> Chunk | None:
        """The chunk to copy next; None when all are copied. It is pending until copied()."""
        with self._changed:
            wanted = (chunk for chunk in self._wanted if chunk in self._pending)
            return next(chain(wanted, self._pending), None)

    def upcoming(self, chunk: Chunk) -> Chunk | None:
        """The chunk that is likely to be copied after `chunk`; None if there is none."""
        with self._changed:
            return next((each for each in self._pending if each != chunk), None)

    def copied(self, chunk: Chunk) -> None:
        """The chunk may change."""
        with self._changed:
            self._pending.pop(chunk, None)
            self._wanted.pop(chunk, None)
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing more is copied, because all is, or because the save has failed."""
        with self._changed:
            self._pending.clear()
            self._changed.notify_all()

    def fail(self, failure: BaseException) -> None:
        """The chunks that are pending must not change any more: wait() raises `failure`."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    @property
    def has_ended(self) -> bool:
        """Whether nothing is pending."""
        return not self._pending

    def may_change(self, chunk: Chunk) -> bool:
        """Whether wait() would return at once."""
        return chunk not in self._pending

    def wait(self, chunk: Chunk) -> None:
        """Until the chunk may change."""
        if chunk not in self._pending:
            return
        with self._changed:
            self._wanted.setdefault(chunk)
            self._wait_for(lambda: chunk not in self._pending)

    def wait_all(self) -> None:
        """Until all chunks may change."""
        with self._changed:
            self._wait_for(lambda: not self._pending)

    def _wait_for(self, is_over: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: is_over() or self._failure is not None)
        if self._failure is not None and not is_over():
            self.was_told = True
            raise self._failure


class Snapshots:
    """The snapshots of saves and commits that go on beside training.

    Attributes:
        wait_s: seconds for which changes have waited for them.
    """

    def __init__(self) -> None:
        """None goes on."""
        self._going_on: list[Snapshot] = []
        self.wait_s = 0.0

    def add(self, snapshot: Snapshot) -> None:
        """From here on changes of chunks wait for `snapshot`, until it ends."""
        self._going_on = [each for each in self._going_on if not each.has_ended]
        self._going_on.append(snapshot)

    def may_change(self, chunk: Chunk) -> bool:
        """Whether wait() would return at once."""
        return all(snapshot.may_change(chunk) for snapshot in self._going_on)

    def wait(self, chunk: Chunk) -> None:
        """Until none has to copy the chunk as it is now. Raises what a commit has met."""
        if self.may_change(chunk):
            return
        began_s = time.perf_counter()
        try:
            for snapshot in self._going_on:
                snapshot.wait(chunk)
        finally:
            self.wait_s += time.perf_counter() - began_s

    def wait_all(self) -> None:
        """wait() of all chunks."""
        for snapshot in self._going_on:
            snapshot.wait_all()


@dataclass(frozen=True)
class CommitChunk:
    """What a commit has of a chunk.

    Attributes:
        chunk: the chunk.
        offsets: where each state kind of this rank's shard begins in the file.
        copied: of these, those that the commit copies to there, from their homes in memory.
        changed: whether the commit before has something else.
    """

    chunk: Chunk
    offsets: Mapping[StateKind, int]
    copied: Sequence[StateKind]
    changed: bool


_KINDS = (StateKind.OPTIM_STATE, StateKind.PARAM)


class TileOffsets(NamedTuple):
    """Where an update of one tile writes that leaves what it reads, as file offsets; -1: nowhere.

    The names are StepTask's, and in its order. `saved_param` is for the old bits of parameters in
    RAM, `param_to` for those in the file.
    """

    optim_state_to: int = -1
    param_to: int = -1
    saved_param: int = -1


class ChunkVersions:
    """What the scratch file has of each chunk beside the extents in use.

    For updates that leave what they read a chunk has a second extent of OPTIM_STATE and one of
    PARAM; swap() makes these spare extents the ones in use. Of what is in RAM, which an update
    changes in place, they have the old bits, which are written with the update. Extents are
    allocated when a chunk first needs them, and kept.

    Of a durable state nothing may write to what the last commit has. What has its home in the file
    is committed where it is: the next update, or other change, of a chunk that has not changed
    since writes to the spare extents. What has its home in memory is copied to the file by each
    commit that finds it changed, to one of two extents in turn.

    Attributes:
        is_durable: there are commits.
        snapshots: of a save and a commit that go on: changes wait for them.
    """

    def __init__(self, memory: StateMemory, chunks: Sequence[ChunkState]) -> None:
        """Nothing is committed yet, and extents are allocated for a durable state alone.

        Raises BudgetError if there is no room for these.
        """
        self._memory, self._chunks = memory, chunks
        self._file, self._arenas = memory.scratch_space, memory.arenas
        self._params = memory.homes[StateKind.PARAM]
        self._optim_states = memory.homes[StateKind.OPTIM_STATE]
        self._full = ""  # why there is no room for more spare extents
        self.snapshots = Snapshots()
        self.is_durable = self._file.is_durable
        if self.is_durable:
            self.reserve_copies()
            self._reserve_all()

    def can_leave(self, chunk: Chunk) -> bool:
        """Whether an update of the chunk can leave all that it reads, because its optimizer state
        is in the file, and its parameters are there or in RAM."""
        return chunk not in self._optim_states and not self._params.on_device(chunk)

    def _kinds(self, chunk: Chunk) -> Sequence[StateKind]:
        """The kinds of state that updates change and commits have."""
        return _KINDS if chunk.trainable else _KINDS[1:]

    def _nbytes(self, chunk: Chunk, kind: StateKind) -> int:
        """Bytes of this rank's shard."""
        return chunk.slots * self._memory.tile_bytes[kind]

    def in_file(self, chunk: Chunk) -> list[StateKind]:
        """The kinds that have their homes in the file."""
        return [kind for kind in self._kinds(chunk) if chunk not in self._memory.homes[kind]]

    # The extents

    def _reserve_all(self) -> None:
        """Allocates the spare extents of all chunks that are trained, which a durable state needs.

        Raises BudgetError, with nothing allocated, if there is no room for them.
        """
        trained = [state for state in self._chunks if state.chunk.trainable]
        extents = [(kind, state.chunk) for state in trained for kind in _KINDS]
        nbytes = sum(self._memory.extent_size(*each).space_bytes for each in extents)
        try:
            self._file.reserve(nbytes)
        except (BudgetError, StoreError, NativeIoError) as error:
            raise BudgetError(
                f"durable=True needs another {format_bytes(nbytes)} on NVMe, for the state from "
                f"before a step, and there is no room: {error}"
            ) from None
        for state in trained:
            self._allocate(state)

    def _reserve(self, state: ChunkState) -> bool:
        """Allocates the chunk's spare extents, if it has none; returns whether there is room."""
        if state.versions.spare:
            return True
        if self._full:
            return False
        try:
            self._allocate(state)
        except (BudgetError, StoreError, NativeIoError) as error:
            self._full = str(error)
            self._file.note(
                [
                    f"updates of some chunks wait for optimizer.step(), because during backward "
                    f"they need a second place on NVMe for their state, and there is no room: "
                    f"{error}"
                ]
            )
            return False
        return True

    def _allocate(self, state: ChunkState) -> None:
        try:
            for kind in self._kinds(state.chunk):
                state.versions.spare[kind] = self._memory.make_extent(kind, state.chunk)
        except BaseException:
            self._free(state)
            raise

    def _free(self, state: ChunkState) -> None:
        for kind, extent in state.versions.spare.items():
            self._memory.free_extent(kind, state.chunk, extent)
        state.versions.spare.clear()

    def free_all(self) -> None:
        """Gives all spare extents back to the file, for homes that are about to move; no
        speculative update is under way.

        A durable state keeps its: what it frees is of no use before the next commit, and the update
        after the move needs them.
        """
        if not self.is_durable:
            for state in self._chunks:
                self._free(state)
        self._full = ""

    # Updates that leave what they read

    def offsets(self, state: ChunkState) -> list[TileOffsets]:
        """Where the update of each tile that is about to be submitted writes in the file beside
        the extents in use."""
        chunk, is_guess = state.chunk, isinstance(state.update, Speculative)
        if not (is_guess or state.versions.leaves_commit):
            return [TileOffsets()] * chunk.slots
        in_ram = chunk in self._params
        state_to, param_to = (
            [
                state.versions.spare[kind].offset + tile * self._memory.tile_bytes[kind]
                for tile in range(chunk.slots)
            ]
            for kind in _KINDS
        )
        nowhere = [-1] * chunk.slots
        made = (
            state_to if chunk not in self._optim_states else nowhere,
            nowhere if in_ram else param_to,
            param_to if in_ram and is_guess else nowhere,
        )
        return [TileOffsets(*offsets) for offsets in zip(*made, strict=True)]

    def swap(self, state: ChunkState) -> None:
        """The chunk's update stays: what it has written is in use from now on."""
        chunk, spare = state.chunk, state.versions.spare
        for kind in self.in_file(chunk):
            extents = self._memory.homes[kind].extents
            used = extents[chunk.id]
            extents[chunk.id] = replace(used, offset=spare[kind].offset)
            spare[kind] = replace(spare[kind], offset=used.offset)

    def _copy(self, state: ChunkState) -> None:
        """Copies what the extents in use have to the spare ones, without what was never written.

        Raises NativeIoError.
        """
        nbytes = max(self._memory.tile_bytes[kind] for kind in _KINDS)
        buffer = HostArena(1, nbytes, Ledger({}), Account.BUFFER)  # which no budget counts
        try:
            buffer.commit(0, 1)
            for kind in self.in_file(state.chunk):
                extent = self._memory.homes[kind].extents[state.chunk.id]
                for begin in range(0, extent.nbytes, nbytes):
                    size = min(nbytes, extent.nbytes - begin)
                    address = buffer.address(0)
                    self._file.read(address, size, extent.offset + begin).wait()
                    to = state.versions.spare[kind].offset + begin
                    self._file.write(address, size, to).wait()
        finally:
            buffer.close()

    def restore(self, state: ChunkState) -> None:
        """Brings the old bits of what is in RAM back. Raises NativeIoError."""
        chunk = state.chunk
        reads = [
            self._file.read(
                self._memory.homes[kind].address(chunk, 0),
                self._nbytes(chunk, kind),
                extent.offset,
            )
            for kind, extent in state.versions.spare.items()
            if chunk in self._memory.homes[kind]
        ]
        for read in reads:
            read.wait()

    def can_speculate(self, state: ChunkState) -> bool:
        """Whether an update of the chunk could be taken back, and is worth being made early.

        What buffers keep unwritten from step to step is not: it is updated as fast as memory. Where
        the spare extents have what the last commit has, none could.
        """
        if not self.can_leave(state.chunk) or self._commit_has_spare(state) or state.was_revoked:
            return False
        keeps = self._arenas.pipeline.keeps(state.first_key, state.chunk.slots)
        return not keeps and self._reserve(state)

    # What the last commit has

    def _commit_has_spare(self, state: ChunkState) -> bool:
        """Whether the last commit has the extents that are not in use."""
        return self.is_durable and state.versions.changed

    def leave_committed(self, state: ChunkState) -> None:
        """The chunk's next update leaves what the last commit has, and waits for one that goes on.

        Raises BudgetError if there is no room for what it writes, and what a commit has met.
        """
        if self._begin_leaving_commit(state):
            state.versions.leaves_commit = True

    def _begin_leaving_commit(self, state: ChunkState) -> bool:
        """Whether the last commit has extents in use; the spare ones are reserved then."""
        if not self.is_durable:
            return False
        self.snapshots.wait(state.chunk)
        if self._commit_has_spare(state) or not self.in_file(state.chunk):
            return False
        if not self._reserve(state):
            raise BudgetError(
                f"durable=True needs a second place on NVMe for the chunk of {state.chunk.name}, "
                f"whose state the last commit has, and there is no room: {self._full}"
            )
        return True

    def begin_write(self, chunk: Chunk) -> None:
        """The chunk's state is about to be changed other than by an update.

        What the last commit has of it stays: the chunk's extents in use are others from here on,
        with the same bits. Raises as leave_committed(), and NativeIoError.
        """
        state = self._chunks[chunk.id]
        if self._begin_leaving_commit(state):
            self._arenas.pipeline.forget(state.first_key, chunk.slots)
            self._copy(state)
            self.swap(state)
        state.versions.changed = True

    def note_submitted(self) -> None:
        """The step's last updates are submitted: what they leave is not in use any more."""
        for state in self._chunks:
            if state.versions.leaves_commit:
                self.swap(state)
                state.versions.leaves_commit = False

    def copies_of(self, coming: Collection[tuple[Chunk, StateKind]]) -> list[int]:
        """The sizes of the extents that reserve_copies() allocates for what is `coming` to memory,
        where all that is there has its copies."""
        return [
            self._nbytes(state.chunk, kind)
            for state in self._chunks
            for kind in self._kinds(state.chunk)
            if (state.chunk, kind) in coming and kind not in state.versions.copies
            for _ in range(2)
        ]

    def reserve_copies(self, coming: Collection[tuple[Chunk, StateKind]] = ()) -> None:
        """Allocates extents for what has its home in memory, or is `coming` there; frees those of
        what has left it.

        Raises BudgetError, with nothing allocated, if there is no room for them.
        """
        missing: list[tuple[ChunkState, StateKind]] = []
        for state in self._chunks:
            chunk, versions = state.chunk, state.versions
            in_file = self.in_file(chunk)
            for kind in self._kinds(chunk):
                if kind in in_file and (chunk, kind) not in coming:
                    versions.copied.discard(kind)
                    for offset in versions.copies.pop(kind, ()):
                        self._file.free(offset, self._nbytes(chunk, kind))
                elif kind not in versions.copies:
                    missing.append((state, kind))
        needed_bytes = 2 * sum(self._nbytes(state.chunk, kind) for state, kind in missing)
        try:
            self._file.reserve(needed_bytes)
        except (BudgetError, StoreError) as error:
            raise BudgetError(
                f"durable=True needs {format_bytes(needed_bytes)} on NVMe for two copies of the "
                f"state in RAM, and there is no room: {error}"
            ) from None
        for state, kind in missing:
            nbytes = self._nbytes(state.chunk, kind)
            first, second = (self._memory.allocate(kind, state.chunk, nbytes) for _ in range(2))
            state.versions.copies[kind] = first, second

    def begin_commit(self) -> list[CommitChunk]:
        """What the commit of the state of now has of each chunk; none has changed from here on.

        Raises BudgetError if there is no room for the copies of homes that have moved.
        """
        self.reserve_copies()
        found = []
        for state in self._chunks:
            chunk, versions = state.chunk, state.versions
            offsets: dict[StateKind, int] = {}
            copied = []
            for kind in self._kinds(chunk):
                homes = self._memory.homes[kind]
                if chunk not in homes:
                    offsets[kind] = homes.extents[chunk.id].offset
                    continue
                last, other = versions.copies[kind]
                if versions.changed or kind not in versions.copied:
                    copied.append(kind)
                    versions.copied.add(kind)
                    versions.copies[kind] = last, other = other, last
                offsets[kind] = last
            found.append(CommitChunk(chunk, offsets, copied, versions.changed))
            versions.changed = False
        return found


class ChunkUpdates:
    """Leads each chunk from phase to phase, and waits for its update.

    Calls come from under ChunkAccess's lock or from the thread that runs backward; wait_updated(),
    wait_computed(), revoke() and reading() may come from any thread.

    Attributes:
        chunks: by id.
        arenas: have the pipeline that makes the updates.
        overlap: when updates are made.
        versions: what the scratch file has of the chunks.
        wait_s: seconds for which updates of chunks that were needed have been waited for.
    """

    def __init__(
        self,
        memory: StateMemory,
        chunks: Sequence[ChunkState],
        versions: ChunkVersions,
        overlap: OverlapUpdates,
    ) -> None:
        """No update has begun."""
        self.chunks, self.arenas = chunks, memory.arenas
        self.overlap = overlap
        self.versions = versions
        self.wait_s = 0.0
        self._homes = memory.homes[StateKind.PARAM]
        self._optim_states = memory.homes[StateKind.OPTIM_STATE]
        # Queues of chunks whose update has begun, and that wait for theirs.
        self._begun: dict[ChunkState, None] = {}
        self._final: dict[ChunkState, None] = {}
        # Guards the step from an update that is not begun to one that is, and back.
        self._speculating = threading.RLock()
        self._first_uses = 0  # in this step

    # Phases

    @property
    def final(self) -> list[Chunk]:
        """The chunks whose gradients are final, in the order in which they came to it."""
        return [state.chunk for state in self._final]

    @property
    def speculative(self) -> list[ChunkState]:
        """The chunks with a speculative update, the first submitted first."""
        return [state for state in list(self._begun) if isinstance(state.update, Speculative)]

    @property
    def under_way(self) -> list[Chunk]:
        """The chunks with an update that stays, the first submitted first."""
        return [state.chunk for state in list(self._begun) if state.is_under_way]

    def set_final(self, chunk: Chunk, final: bool) -> None:
        """No update has begun: whether backward adds no more gradients."""
        state = self.chunks[chunk.id]
        assert isinstance(state.update, Open)
        if state.update.is_final is not final:
            state.update = Open(final)
            if final:
                self._final[state] = None
            else:
                self._final.pop(state, None)

    def submit(self, chunk: Chunk, members: Sequence[ManagedParam], is_awaited: bool) -> None:
        """To Submitted: an update of `members` that stays is about to be submitted."""
        self.set_final(chunk, False)
        state = self.chunks[chunk.id]
        state.update = Submitted(members, is_awaited)
        self._begun[state] = None
        state.versions.changed = True

    def finish(self, chunk: Chunk) -> None:
        """From Done to Open: the parameters have the new values."""
        state = self.chunks[chunk.id]
        assert isinstance(state.update, Done)
        state.update = Open()
        self._begun.pop(state, None)  # (last: what is Open counts for nothing in this queue)

    def end_step(self) -> None:
        """step() has submitted all: the next forward is another one."""
        for chunk in self.final:
            self.set_final(chunk, False)
        for state in self.chunks:
            state.was_revoked, state.first_use = False, None
        self._first_uses = 0

    # Speculation

    @contextmanager
    def speculating(self, chunk: Chunk, update: Speculative) -> Iterator[bool]:
        """To Speculative: members are UPDATING. Inside the block, in which no other thread takes
        the update back, it is submitted; or not, if this yields False: somebody reads the chunk.
        """
        self.set_final(chunk, False)
        state = self.chunks[chunk.id]
        with self._speculating:
            state.update = update
            self._begun[state] = None
            if is_read := state.readers > 0:
                self._end_speculation(state)
            yield not is_read

    @contextmanager
    def reading(self, chunk: Chunk) -> Iterator[None]:
        """Inside the block, in any thread, no speculative update writes to the chunk's memory: one
        that was submitted is taken back, and none begins. Raises as revoke()."""
        state = self.chunks[chunk.id]
        with self._speculating:
            state.readers += 1
        try:
            self.revoke(chunk)
            yield
        finally:
            with self._speculating:
                state.readers -= 1

    def confirm(self, chunk: Chunk) -> None:
        """From Speculative to Submitted: the update stays."""
        state = self.chunks[chunk.id]
        with self._speculating:
            assert isinstance(state.update, Speculative)
            self.versions.swap(state)
            state.versions.leaves_commit, state.versions.changed = False, True
            state.update = Submitted(state.update.members, not self.goes_on(chunk))

    def take_back(self, chunk: Chunk) -> bool:
        """From Speculative to Open if the update has not begun; returns whether."""
        state = self.chunks[chunk.id]
        with self._speculating:
            if not self.arenas.pipeline.take_back(state.first_key, chunk.slots):
                return False
            self._end_speculation(state)
        return True

    def revoke(self, chunk: Chunk) -> None:
        """From Speculative, if the chunk is in it, to Open, before anybody uses its values or
        changes its gradient: parameters and optimizer state are as before the update.

        Raises what the update met, NativeIoError if old values cannot be read back.
        """
        state = self.chunks[chunk.id]
        if not isinstance(state.update, Speculative):
            return
        with self._speculating:
            if not isinstance(state.update, Speculative):
                return  # another thread has done it
            state.was_revoked = True
            if self.take_back(chunk):
                return
            self.arenas.pipeline.forget(state.first_key, chunk.slots)
            self.versions.restore(state)
            self._end_speculation(state)

    def _end_speculation(self, state: ChunkState) -> None:
        assert isinstance(state.update, Speculative)
        home = self._homes.resident(state.chunk)
        for m in state.update.members:
            m.revoke_update(home)
        state.update = Open()
        self._begun.pop(state, None)

    def revoke_all(self) -> None:
        """revoke() of all chunks."""
        for state in self.speculative:
            self.revoke(state.chunk)

    # Waiting

    def goes_on(self, chunk: Chunk) -> bool:
        """Whether step() returns while the chunk's update goes on.

        By default not where both parameters and optimizer state are in memory that compute uses:
        there an update is as fast as memory, and would only share it with forward.
        """
        if self.overlap is OverlapUpdates.AUTO:
            return not (self._homes.is_resident(chunk) and chunk in self._optim_states)
        return self.overlap.in_forward

    def wait_updated(self, chunk: Chunk) -> None:
        """From Submitted to Done: until the update is made. Raises what it met."""
        state = self.chunks[chunk.id]
        if isinstance(state.update, Submitted):
            began_s = time.perf_counter()
            try:
                self.wait_computed(chunk)
            finally:
                self.wait_s += time.perf_counter() - began_s
            update = state.update
            if isinstance(update, Submitted):  # else another thread has finished it meanwhile
                state.update = Done(update.members, update.is_awaited)

    def wait_all_computed(self) -> None:
        """wait_computed() of all chunks, in one call of native code."""
        began_s = time.perf_counter()
        try:
            self.arenas.pipeline.wait_updated()
        finally:
            self.wait_s += time.perf_counter() - began_s

    def wait_computed(self, chunk: Chunk) -> None:
        """Until no update of the chunk is to be computed. Raises what one met. For any thread."""
        self.arenas.pipeline.wait_updated(self.chunks[chunk.id].first_key, chunk.slots)

    def is_computed(self, chunk: Chunk) -> bool:
        """Whether wait_computed() would return, or raise, at once."""
        return self.arenas.pipeline.is_updated(self.chunks[chunk.id].first_key, chunk.slots)

    def wait_written(self, chunk_id: int) -> None:
        """Until the file has the chunk's new parameters. Raises what the update met."""
        state = self.chunks[chunk_id]
        self.arenas.pipeline.wait_written(state.first_key, state.chunk.slots)

    def is_readable(self, chunk: Chunk) -> bool:
        """Whether its parameters can be read from their home now, without waiting."""
        state = self.chunks[chunk.id]
        if isinstance(state.update, Speculative):
            return False
        if chunk in self._homes:
            return self.is_computed(chunk)
        return self.arenas.pipeline.is_written(state.first_key, chunk.slots)

    def note_use(self, state: ChunkState) -> None:
        """Forward is about to use the chunk for the first time."""
        if self.overlap.in_forward:
            state.first_use = self._first_uses
            self._first_uses += 1


@dataclass(frozen=True, eq=False)
class OwnShards:
    """Reads and writes the values of this rank's shards. Several threads may use it at once.

    `slots` are for copies of those on DISK. With one rank a shard is the whole chunk, and the slots
    are those of gathered copies. Reads wait for `updates`, other ranks' too.
    """

    homes: Homes
    slots: SharedWriteBackCache
    updates: ChunkUpdates

    @contextmanager
    def open(self, chunk: Chunk) -> Iterator[torch.Tensor]:
        """The shard's values, flat, inside the block; waits for the update that makes them.

        A speculative one is taken back, and none begins that would write to what is read.

        Raises what the update met, BudgetError if there is no room, NativeIoError if the shard
        cannot be read.
        """
        if chunk in self.homes:
            with self.updates.reading(chunk):
                self.updates.wait_computed(chunk)
                yield self.homes.shard(chunk)
        else:
            self.wait_computed(chunk)
            with self.slots.open(chunk.id) as shard:
                yield shard

    def wait_computed(self, chunk: Chunk) -> None:
        """Until the update that makes the shard's values is made; a speculative one is taken back.

        Raises what the update met.
        """
        self.updates.revoke(chunk)
        self.updates.wait_computed(chunk)

    def fill(self, chunk: Chunk) -> AbstractContextManager[torch.Tensor]:
        """Flat memory for new values of the whole shard; call filled() in the block when they are
        there. Raises BudgetError if there is no room."""
        if chunk in self.homes:
            return nullcontext(self.homes.shard(chunk))
        return self.slots.fill(chunk.id)

    def filled(self, chunk: Chunk) -> None:
        """The values that fill() or open() gave were changed; returns when they are home."""
        if chunk not in self.homes:
            self.slots.changed(chunk.id)

    def invalidate(self, chunk: Chunk) -> None:
        """The optimizer is about to write new values to the shard's home."""
        if chunk not in self.homes:
            self.slots.drop(chunk.id)
