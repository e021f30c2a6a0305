"""Parameters: resident where compute happens, or gathered there while they are used."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from hetero.chunks.layout import Chunk
from hetero.planning.belady import PREFETCH_CHUNKS
from hetero.ranks.shard_server import Versions
from hetero.state.chunk_updates import (
    ChunkUpdates,
    Done,
    Open,
    OwnShards,
    Speculative,
    Submitted,
    UsedCopy,
)
from hetero.state.gathering.agreed_gathers import AgreedGathers
from hetero.state.gathering.all_gather import Gathering
from hetero.state.managed_param import ManagedParam, ParamState
from hetero.state.memory import Homes
from offload import timeline
from offload.cache.slot_cache import SlotCache, UseOrder
from offload.errors import HeteroError, StaleGraphError
from offload.memory.arena import HostArena
from offload.memory.operation import wait_quietly


class CopyCache(Protocol):
    """A cache of copies of parameters, or what fills one."""

    def drop(self, chunk: int) -> None:
        """Forgets the chunk's copy, once it is not being made any more."""

    def clear(self) -> None:
        """Forgets all copies. Raises what a transfer met."""

    def refit(self) -> None:
        """The arena was resized while it held no copy."""


@dataclass(frozen=True, eq=False)
class CopyCaches:
    """All caches on the way of a chunk group's parameters from home to compute.

    Attributes:
        arena: the slots of the copies that compute uses.
        cache: these copies, flat and whole.
        order: the learned order in which steps gather chunks.
        dtype: of the copies.
        whole: the caches of whole copies, the one nearest to compute first; none where shards are
            whole.
        shards: this rank's part, whose copies are of the file.
        has_soft_limit: the cache may use more slots than Placement.gathered_slots while RAM is
            free.
    """

    arena: HostArena
    cache: SlotCache
    order: UseOrder
    dtype: torch.dtype
    whole: Sequence[CopyCache]
    shards: OwnShards
    has_soft_limit: bool

    def discard(self, chunk: Chunk) -> None:
        """Forgets all copies of the chunk, whole and of this rank's shard; home has its values."""
        self.drop(chunk)
        self.shards.invalidate(chunk)

    def drop(self, chunk: Chunk) -> None:
        """Forgets the chunk's whole copies, once none is being made any more."""
        for cache in self.whole:
            cache.drop(chunk.id)

    def clear(self) -> None:
        """Forgets all copies of all chunks; none may be in use. Raises what a transfer met."""
        for cache in (*self.whole, self.shards.slots):
            cache.clear()

    def refit(self, gathered_slots: int) -> None:
        """The arenas have other sizes than before; no copy is in use.

        `gathered_slots` is the limit of gathered copies, soft if they may use more while RAM is
        free.
        """
        for cache in (*self.whole, self.shards.slots):
            cache.refit()
        if self.has_soft_limit:
            self.cache.refit(gathered_slots)

    def pinned(self) -> int:
        """Gathered copies that some tensor views now."""
        return self.arena.live_views()


class ParamUpdates:
    """Leads parameters through the phases of their chunk's update.

    No copy of old values is left when an update begins; other ranks are told of new versions, and
    get the values where all ranks have homes of whole chunks (stages 1 and 2).
    """

    def __init__(
        self,
        homes: Homes,
        copies: CopyCaches,
        updates: ChunkUpdates,
        versions: Versions | None,
        gathering: Gathering | None,
        lead_threads: Callable[[], None],
    ) -> None:
        """No update has begun. `versions` make other ranks wait from a change until it is
        published; one rank has none, and gathers nothing. `lead_threads` is Backend's."""
        self._homes = homes
        self._copies = copies
        self._updates = updates
        self._chunks = updates.chunks
        self._gathering = gathering if homes.whole else None
        # Whether other ranks' new values come to this rank's homes, in publish().
        self.gathers = self._gathering is not None
        self._versions = versions
        self._lead_threads = lead_threads

    def begin(self, chunk: Chunk, members: Sequence[ManagedParam]) -> None:
        """An update of `members`, parameters of the chunk, is about to be submitted.

        The parameters are UPDATING until finish(), unless they are in use, or step() waits for such
        updates before anything can use them.
        """
        self._updates.versions.snapshots.wait(chunk)
        self.change(chunk)
        self._copies.discard(chunk)
        is_awaited = not self._updates.goes_on(chunk) or any(m.uses for m in members)
        for m in members:
            if is_awaited:
                m.note_update()
            else:
                m.begin_update()
        is_awaited = is_awaited or not self._detach_home(chunk)
        self._updates.submit(chunk, members, is_awaited)

    def _detach_home(self, chunk: Chunk) -> bool:
        """Whether no tensor views the chunk's home, whose parameters are UPDATING."""
        resident = self._homes.is_resident(chunk)
        return not resident or self._homes.release_view(chunk, collect=False)

    def begin_speculation(self, chunk: Chunk, members: Sequence[ManagedParam]) -> bool:
        """A speculative update of `members` may be about to begin: they are UPDATING.

        Returns False, with nothing changed, if another tensor views the chunk's home: it would see
        values that step() may not confirm.
        """
        self._updates.versions.snapshots.wait(chunk)
        for m in members:
            m.begin_update(revocable=True)
        if not self._detach_home(chunk):
            home = self._homes.resident(chunk)
            for m in members:
                m.revoke_update(home)
            return False
        self._copies.drop(chunk)  # a device may be copying from it
        return True

    def confirm(self, chunk: Chunk) -> None:
        """The chunk's speculative update stays."""
        self.change(chunk)
        self._copies.discard(chunk)  # also of old values that were read while it was prepared
        self._updates.confirm(chunk)

    def finish(self, chunks: Sequence[Chunk]) -> None:
        """Waits for the updates of `chunks` that are under way; parameters get the new values.

        Raises what an update met; this can be called again then.
        """
        chunks = [chunk for chunk in chunks if self._chunks[chunk.id].is_under_way]
        for chunk in chunks:
            self._updates.wait_updated(chunk)
        self.finish_gathers(chunks)
        for chunk in chunks:
            update, home = self._chunks[chunk.id].update, self._homes.resident(chunk)
            if isinstance(update, Done):
                for m in update.members:
                    m.end_update(home)
                self._updates.finish(chunk)  # last, so that all of it is done again after Ctrl-C

    # What other ranks have

    def change(self, chunk: Chunk) -> None:
        """The chunk's values are about to change: other ranks wait until publish()."""
        if self._versions is not None:
            self._versions.change(chunk)

    def publish(self, chunks: Sequence[Chunk]) -> None:
        """Other ranks may have the new values of `chunks`. All ranks call it with the same ones.

        Where homes are whole the other ranks' start to come in; they come when updates are made.
        """
        if self._versions is not None:
            self._lead_threads()  # they answer, and gather
            for chunk in chunks:
                self._versions.publish(chunk)
        if self._gathering is not None:
            for chunk in sorted(chunks, key=lambda chunk: chunk.id):
                gather = self._gathering.start(chunk, self._homes.flat(chunk))
                self._chunks[chunk.id].whole_gather = gather

    def fail_waiting_ranks(self, why: str) -> None:
        """Tells the ranks that wait for values of this one that these will not come, and why."""
        if self._versions is not None:
            self._versions.end(why)

    def finish_gathers(self, chunks: Iterable[Chunk]) -> None:
        """Waits for what publish() has started of `chunks`. Raises what it met."""
        for chunk in chunks:
            state = self._chunks[chunk.id]
            if state.whole_gather is not None:
                state.whole_gather.wait()
                state.whole_gather = None

    def wait_gathers_quietly(self) -> None:
        """Waits until what publish() has started is made, or has failed."""
        for state in self._chunks:
            wait_quietly(state.whole_gather)


@dataclass(frozen=True)
class SavedView:
    """A view of a gathered copy that autograd saved: enough to make the view again."""

    chunk: Chunk
    version: tuple[int, int]  # of the parameter: a change leaves its neighbours' graphs alone
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # elements from the chunk's beginning


class ChunkAccess:
    """Gives one chunk group's parameters their values, and takes them back.

    A resident parameter is always a view of its home, which is in RAM if compute happens there and
    on DEVICE if not. acquire() points another one to a gathered copy of its chunk, and release()
    offloads it again. A copy's slot is pinned as long as any tensor over it lives.

    Attributes:
        copies: of the parameters that are not resident.
        updates: leads the parameters through updates of their chunks.
        agreed_gathers: the all-gathers of all ranks.
        is_resident: whether the chunk is used in place, as Homes has it.
    """

    def __init__(
        self,
        homes: Homes,
        copies: CopyCaches,
        updates: ChunkUpdates,
        members: ParamUpdates,
        gathering: Gathering | None,
        agreed_gathers: AgreedGathers | None,
        prefetch: bool,
    ) -> None:
        """Access to one chunk group's parameters; none has values yet.

        Args:
            homes: of PARAM.
            copies: of parameters that are not resident.
            updates: of all chunks.
            members: the parameters in these updates.
            gathering: from other ranks; None for one rank.
            agreed_gathers: the all-gathers of all ranks; None where nothing is gathered from ranks
                for its use.
            prefetch: the chunks that are expected next are gathered ahead of their use.
        """
        self._homes, self.copies = homes, copies
        self.is_resident = homes.is_resident
        self._updates, self._chunks = updates, updates.chunks
        self.updates = members
        self._gathering, self.agreed_gathers = gathering, agreed_gathers
        self._prefetch = prefetch
        self._chunk_of_slot: dict[int, Chunk] = {}
        # Several threads may run forwards and backwards at once.
        self._lock = threading.RLock() if agreed_gathers is None else agreed_gathers.lock

    @property
    def gathers(self) -> bool:
        """Whether some parameters are gathered."""
        return self.copies.arena.slots > 0

    @property
    def wait_s(self) -> float:
        """Seconds for which compute has waited for gathered copies."""
        return self.copies.cache.wait_s

    def may_be_absent(self, chunk: Chunk) -> bool:
        """Whether its parameters are not always where compute uses them: they are gathered, or
        may be under way in an update."""
        in_update = self._updates.goes_on(chunk) or self.may_change_in_backward(chunk)
        return in_update or not self.is_resident(chunk)

    def may_change_in_backward(self, chunk: Chunk) -> bool:
        """Whether a speculative update may change its parameters in place.

        A parameter that autograd has saved forbids that, as an alias, which pins the home; the
        parameter itself does not.
        """
        updates = self._updates
        in_backward = updates.overlap.in_backward and chunk.trainable
        return in_backward and self.is_resident(chunk) and updates.versions.can_leave(chunk)

    def has_room(self, chunk: Chunk) -> bool:
        """Whether flat() finds room now, without more RAM than the plan has for gathered copies.
        The chunk is not resident."""
        return self._chunks[chunk.id].used is not None or self.copies.cache.has_room(chunk.id)

    def flat(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's values now, whole and flat; unless resident, a pin on a gathered copy.

        Waits for the chunk's update, or takes a speculative one back.

        Raises:
            NativeIoError, RuntimeError: what the update met.
            BudgetError: pins leave no room for the copy.
            PeerError, NativeIoError: it cannot be made.
        """
        with self._lock:
            used = self._chunks[chunk.id].used
            if used is not None or self.is_resident(chunk):
                self._wait_usable(chunk)
                return self._homes.flat(chunk) if used is None else self._shared(used)
            if self.agreed_gathers is not None:
                # First, because other ranks wait for this one; its own shard waits for its update.
                self.agreed_gathers.note(chunk)
            self._wait_usable(chunk)
            return self._gather(chunk)

    def _shared(self, used: UsedCopy) -> torch.Tensor:
        self.copies.arena.share(used.copy)
        return used.copy

    @timeline.marked("hetero::gather")
    def _gather(self, chunk: Chunk) -> torch.Tensor:
        self.copies.order.note(chunk.id)
        agreed, began_s = self.agreed_gathers, time.perf_counter()
        self.copies.cache.get(chunk.id)
        timeline.note("gather", began_s)
        slot = self.copies.arena.slot_of(self.copies.cache.address(chunk.id))
        assert slot is not None
        self._chunk_of_slot[slot] = chunk
        copy = self.copies.cache.tensor(chunk.id, self.copies.dtype)
        if self._prefetch and not (agreed is not None and agreed.uses.leads):
            # Not chunks whose update is not written yet: starting to read one waits until it is.
            self.copies.cache.prefetch(PREFETCH_CHUNKS, self._is_being_updated)
        return copy

    def acquire(self, managed: ManagedParam) -> None:
        """Gives the parameter its values until as many release() calls. Raises as flat()."""
        with self._lock:
            copy: torch.Tensor | None = None
            used = self._chunks[managed.chunk.id].used
            if managed.uses and used is not None:
                self._shared(used)
            elif not managed.uses:
                if self.is_resident(managed.chunk):
                    self._wait_usable(managed.chunk)
                else:
                    copy = self.flat(managed.chunk)
                    _require_unwritten(managed)
            managed.begin_use(copy)
            if copy is not None:
                state = self._chunks[managed.chunk.id]
                state.used = state.used or UsedCopy(copy)
                state.used.params += 1

    def release(self, managed: ManagedParam) -> torch.Tensor | None:
        """Undoes one acquire().

        Returns:
            What user code has made of the gathered copy, if it has changed it: a pin on it.
        """
        with self._lock:
            was_gathered = managed.state is ParamState.GATHERED
            changed = managed.end_use()
            if not (was_gathered and managed.state is ParamState.OFFLOADED):
                return None
            state = self._chunks[managed.chunk.id]
            used = state.used
            assert used is not None
            used.params -= 1
            if not used.params:
                state.used = None
            return managed.part_of(used.copy) if changed else None

    def fill(self, chunk: Chunk) -> AbstractContextManager[torch.Tensor]:
        """Flat memory, inside the block, for the first values of this rank's shard.

        Write them and call filled() inside the block. All ranks call both.
        """
        self._wait_usable(chunk)
        return self.copies.shards.fill(chunk)

    def shard(self, chunk: Chunk) -> AbstractContextManager[torch.Tensor]:
        """This rank's shard inside the block. If it was changed, call filled() in the block."""
        self._wait_usable(chunk)
        self._updates.versions.snapshots.wait(chunk)
        self.copies.drop(chunk)  # a device may be copying from it
        return self.copies.shards.open(chunk)

    def filled(self, chunk: Chunk) -> None:
        """Brings changed values of the shard home, and to the ranks that have the chunk whole.

        Returns when they are there. All ranks call it.
        """
        self._updates.versions.begin_write(chunk)
        self.updates.change(chunk)
        self.copies.drop(chunk)
        self.copies.shards.filled(chunk)
        self.updates.publish([chunk])
        self.updates.finish_gathers([chunk])

    def keep_written(self, managed: ManagedParam, values: torch.Tensor) -> None:
        """Brings what user code has made of the parameter home. For one rank.

        Values of other parameters in the chunk stay as they are, and so do graphs that use them.
        """
        with self.shard(managed.chunk) as shard:
            self._updates.versions.begin_write(managed.chunk)
            managed.part_of(shard).copy_(values)
            self.copies.shards.filled(managed.chunk)

    def _wait_usable(self, chunk: Chunk) -> None:
        """Until the chunk's parameters have their values. Raises as flat()."""
        state = self._chunks[chunk.id]
        if isinstance(state.update, Speculative):
            self._updates.revoke(chunk)
        if state.first_use is None:
            self._updates.note_use(state)
        if isinstance(state.update, Submitted | Done):
            began_s = time.perf_counter()
            with timeline.mark("hetero::wait_update"):
                self.updates.finish([chunk])
            timeline.note("gather", began_s)

    def _is_being_updated(self, chunk_id: int) -> bool:
        """Whether the chunk cannot be read from its home without waiting."""
        state = self._chunks[chunk_id]
        if self.updates.gathers:  # other ranks' parts come when the update is finished
            return not isinstance(state.update, Open)
        return not self._updates.is_readable(state.chunk)

    def finish_transfers(self) -> None:
        """Waits until nothing that was asked of other ranks is under way."""
        if self._gathering is not None:
            self.copies.cache.finish_transfers()

    def pack(self, tensor: torch.Tensor) -> SavedView | None:
        """How to make `tensor` again if it is a view of a gathered copy; else None."""
        if tensor.dtype is not self.copies.dtype:
            return None
        slot = self.copies.arena.slot_of(tensor.untyped_storage().data_ptr())
        if slot is None:
            return None
        chunk, offset = self._chunk_of_slot[slot], int(tensor.storage_offset())
        version = self._version(chunk, offset)
        return SavedView(chunk, version, tensor.size(), tensor.stride(), offset)

    def _version(self, chunk: Chunk, offset: int) -> tuple[int, int]:
        """Differs after a change of the parameter that has the element at `offset`."""
        members = self._chunks[chunk.id].members
        return members[bisect_right(members, offset, key=lambda m: m.slice.offset) - 1].version

    def unpack(self, saved: SavedView) -> torch.Tensor:
        """Makes the tensor that was packed again, over a copy that is gathered if need be.

        Raises StaleGraphError if the parameters were changed since.
        """
        if saved.version != self._version(saved.chunk, saved.offset):
            raise StaleGraphError(
                f"backward needs {saved.chunk.name} as it was before an optimizer step, or a write "
                f"in place, that came between this graph's forward and its backward; call backward "
                f"before step"
            )
        return self.flat(saved.chunk).as_strided(saved.size, saved.stride, saved.offset)

    def note_slots(self, gathered_slots: int) -> None:
        """The arenas have other sizes than before, and homes have moved; no copy is in use.

        `gathered_slots` is the limit of gathered copies, soft if they may use more while RAM is
        free.
        """
        assert not any(state.used for state in self._chunks)
        self.copies.refit(gathered_slots)
        self._chunk_of_slot.clear()
        chunks = (state.chunk for state in self._chunks)
        self.copies.order.use_in_place([c.id for c in chunks if self.is_resident(c)])

    def stop(self) -> None:
        """Ends what is under way; nothing can be gathered any more."""
        if self._gathering is not None:
            self._gathering.abandon()
        self.copies.cache.close()

    def close(self) -> None:
        """Drops the pins on gathered copies; the engine is closing."""
        for state in self._chunks:
            state.used = None


def _require_unwritten(managed: ManagedParam) -> None:
    """Raises HeteroError, once, if something was written while the values were not here.

    That was a view, with a gradient, of a copy of the parameter.
    """
    if managed.writes.are_unnoticed:
        managed.writes.note()
        raise HeteroError(
            f"{managed.name} was written to through a view that had been taken while its values "
            f"were not in memory; that write is lost: write to the parameter itself, or to a view "
            f"of {managed.name}.data"
        )
