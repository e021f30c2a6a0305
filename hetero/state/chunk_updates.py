"""The updates of a chunk group's chunks: their phases (chunk_state.py), and the waits for them.

Parameters, gradients, optimizer states and the server of other ranks ask here before they touch a
chunk's memory. When an update is submitted, and whether step() waits for it, is decided in
hetero/runtime/update_schedule.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from hetero.chunks.layout import Chunk
from hetero.overlap import OverlapUpdates
from hetero.state.chunk_state import ChunkState, Done, Open, Speculative, Submitted
from hetero.state.chunk_versions import ChunkVersions
from hetero.state.managed_param import ManagedParam
from hetero.state.memory.homes import Homes, SlotArenas
from offload.cache.slot_cache import SharedWriteBackCache
from offload.memory.tiers import StateKind


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
        chunks: Sequence[ChunkState],
        homes: Mapping[StateKind, Homes],
        arenas: SlotArenas,
        versions: ChunkVersions,
        overlap: OverlapUpdates,
    ) -> None:
        """No update has begun."""
        self.chunks, self.arenas = chunks, arenas
        self.overlap = overlap
        self.versions = versions
        self.wait_s = 0.0
        self._homes = homes[StateKind.PARAM]
        self._optim_states = homes[StateKind.OPTIM_STATE]
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

    def decide(self, chunk: Chunk, confirmed: bool) -> None:
        """From Speculative to Submitted.

        The update stays if it is `confirmed`. Else it is about to be submitted once more, of the
        same members, with what the file had before the first.
        """
        state = self.chunks[chunk.id]
        with self._speculating:
            assert isinstance(state.update, Speculative)
            members, is_awaited = state.update.members, not self.goes_on(chunk)
            state.versions.changed = True
            if confirmed:
                self.versions.swap(chunk)
                state.versions.leaves_commit = False
            state.update = Submitted(members, is_awaited, is_remade=not confirmed)

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
            self.versions.restore(chunk)
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
