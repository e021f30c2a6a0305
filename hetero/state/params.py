"""Parameters: resident where compute happens, or gathered there while they are used."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from hetero.chunks.layout import Chunk, Layout
from hetero.planning.belady import PREFETCH_CHUNKS
from hetero.profiler_marks import mark, marked
from hetero.ranks.gather_news import GatherNews
from hetero.ranks.shard_server import Versions
from hetero.state.chunk_updates import ChunkUpdates, UpdateState
from hetero.state.gathering.agreed_gathers import AgreedGathers
from hetero.state.gathering.all_gather import Gathering
from hetero.state.gathering.gather_stream import CommonGather
from hetero.state.gathering.param_shards import ParamShards
from hetero.state.managed_param import ManagedParam, ParamState
from hetero.state.memory.homes import Homes
from offload import timeline
from offload.cache.slot_cache import SlotCache
from offload.cache.use_order import UseOrder
from offload.errors import StaleGraphError
from offload.memory.arena import HostArena
from offload.memory.operation import wait_quietly


@dataclass(frozen=True)
class SavedView:
    """A view of a gathered copy that autograd saved: enough to make the view again."""

    chunk: Chunk
    version: tuple[int, int]  # of the parameter: a change leaves its neighbours' graphs alone
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # elements from the chunk's beginning


@dataclass
class _UsedCopy:
    """A gathered copy of a chunk, whole and flat, and how many parameters are views of it."""

    copy: torch.Tensor
    params: int = 0


class CopyCache(Protocol):
    """A cache of copies of parameters, or what fills one."""

    def clear(self) -> None:
        """Forgets all copies. Raises what a transfer met."""

    def refit(self) -> None:
        """The arena was resized while it held no copy."""


@dataclass(frozen=True)
class ParamCopies:
    """Copies of parameters between their homes and compute.

    `cache` has those that compute uses, in `arena`, flat and whole in `dtype`. `clearable` are all
    caches on the way, nearest to compute first, those of shards included; `drops` forget one
    chunk's whole copies, in this order. `has_soft_limit`: the cache may use more slots than
    Placement.gathered_slots while RAM is free.
    """

    arena: HostArena
    cache: SlotCache
    order: UseOrder
    dtype: torch.dtype
    clearable: Sequence[CopyCache]
    drops: Sequence[Callable[[int], object]]
    has_soft_limit: bool


class Params:
    """Gives one chunk group's parameters their values, and takes them back.

    A resident parameter is always a view of its home, which is in RAM if compute happens there and
    on DEVICE if not. acquire() points another one to a gathered copy of its chunk, and release()
    offloads it again. A copy's slot is pinned as long as any tensor over it lives.
    """

    def __init__(
        self,
        layout: Layout,
        members: Iterable[ManagedParam],
        homes: Homes,
        shards: ParamShards,
        copies: ParamCopies,
        prefetch: bool,
        versions: Versions,
        gathering: Gathering | None,
        news: GatherNews,
        updates: ChunkUpdates,
    ) -> None:
        """Access to one chunk group's parameters; none has values yet.

        `prefetch`: the chunks that are expected next are gathered ahead of their use. `versions`
        tell other ranks of changes. `gathering` is None for one rank; `news` is what other ranks
        tell about gathers.
        """
        self._layout = layout
        self._members: dict[int, list[ManagedParam]] = {}  # by chunk id, in the chunk's order
        for m in sorted(members, key=lambda m: m.slice.offset):
            self._members.setdefault(m.chunk.id, []).append(m)
        self._homes = homes
        self._shards = shards
        self._copies = copies
        self._arena = copies.arena
        self._cache = copies.cache
        self.order = copies.order
        self._dtype = copies.dtype
        self._prefetch = prefetch
        self.versions = versions
        self._gathering = gathering
        self._chunk_of_slot: dict[int, Chunk] = {}
        self._used: dict[int, _UsedCopy] = {}  # by chunk id
        self._lock = threading.RLock()  # several threads may run forwards and backwards at once
        # The all-gathers of all ranks; None where nothing is gathered from ranks for its use.
        self.agreed_gathers: AgreedGathers | None = None
        if gathering is not None and not homes.whole:
            self.agreed_gathers = AgreedGathers(
                layout, gathering, self.is_resident, copies.cache, news, self._lock, prefetch
            )
        # Where homes are whole: gathers of new values, by chunk id.
        self._whole_gathers: dict[int, CommonGather] = {}
        self._updates = updates
        # In state UPDATING, by chunk id, but for those of speculative updates.
        self._updating: dict[int, Sequence[ManagedParam]] = {}
        self._awaited: set[int] = set()  # ids of chunks whose updates step() waits for

    @property
    def gathers(self) -> bool:
        """Whether some parameters are gathered, and pack() and unpack() are needed."""
        return self._arena.slots > 0

    @property
    def wait_s(self) -> float:
        """Seconds for which compute has waited for gathered copies."""
        return self._cache.wait_s

    def is_resident(self, chunk: Chunk) -> bool:
        """Whether the whole chunk's home is where compute happens, which uses it in place."""
        return self._homes.is_resident(chunk)

    def may_be_absent(self, chunk: Chunk) -> bool:
        """Whether its parameters are not always where compute uses them: they are gathered, or
        may be under way in an update."""
        return not self.is_resident(chunk) or self._updates.goes_on(chunk)

    def home(self, chunk: Chunk) -> torch.Tensor | None:
        """A resident chunk's home, flat, whether its values are there or not; None for others."""
        return self._homes.flat(chunk) if self.is_resident(chunk) else None

    def has_room(self, chunk: Chunk) -> bool:
        """Whether flat() finds room now, without more RAM than the plan has for gathered copies."""
        in_place = self.is_resident(chunk) or chunk.id in self._used
        return in_place or self._cache.has_room(chunk.id)

    def flat(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's values now, whole and flat; unless resident, a pin on a gathered copy.

        Waits for the chunk's update, or takes a speculative one back.

        Raises:
            NativeIoError, RuntimeError: what the update met.
            BudgetError: pins leave no room for the copy.
            PeerError, NativeIoError: it cannot be made.
        """
        with self._lock:
            if self.is_resident(chunk) or chunk.id in self._used:
                self._wait_usable(chunk)
                home = self.home(chunk)
                return self._used[chunk.id].copy if home is None else home
            if self.agreed_gathers is not None:
                # First, because other ranks wait for this one; its own shard waits for its update.
                self.agreed_gathers.note(chunk)
            self._wait_usable(chunk)
            return self._gather(chunk)

    @marked("hetero::gather")
    def _gather(self, chunk: Chunk) -> torch.Tensor:
        self.order.note(chunk.id)
        agreed = self.agreed_gathers
        with timeline.span("gather"):
            self._cache.get(chunk.id)
        slot = self._arena.slot_of(self._cache.address(chunk.id))
        assert slot is not None
        self._chunk_of_slot[slot] = chunk
        copy = self._cache.tensor(chunk.id, self._dtype)
        if self._prefetch and not (agreed is not None and agreed.leads):
            # Not chunks whose update is not written yet: starting to read one waits until it is.
            self._cache.prefetch(PREFETCH_CHUNKS, self._is_being_updated)
        return copy

    def acquire(self, managed: ManagedParam) -> None:
        """Gives the parameter its values until as many release() calls. Raises as flat()."""
        with self._lock:
            copy: torch.Tensor | None = None
            if not managed.uses:
                flat = self.flat(managed.chunk)
                if not self.is_resident(managed.chunk):
                    managed.require_unwritten()
                    copy = flat
            managed.begin_use(copy)
            if copy is not None:
                self._used.setdefault(managed.chunk.id, _UsedCopy(copy)).params += 1

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
            used = self._used[managed.chunk.id]
            used.params -= 1
            if not used.params:
                del self._used[managed.chunk.id]
            return managed.part_of(used.copy) if changed else None

    def fill(self, chunk: Chunk) -> AbstractContextManager[torch.Tensor]:
        """Flat memory, inside the block, for the first values of this rank's shard.

        Write them and call filled() inside the block. All ranks call both.
        """
        self._wait_usable(chunk)
        return self._shards.fill(chunk)

    def shard(self, chunk: Chunk) -> AbstractContextManager[torch.Tensor]:
        """This rank's shard inside the block. If it was changed, call filled() in the block."""
        self._wait_usable(chunk)
        self._updates.wait_copied(chunk)
        self.drop_copies(chunk)  # a device may be copying from it
        return self._shards.open(chunk)

    def filled(self, chunk: Chunk) -> None:
        """Brings changed values of the shard home, and to the ranks that have the chunk whole.

        Returns when they are there. All ranks call it.
        """
        self._updates.begin_write(chunk)
        self.versions.change(chunk)
        self.drop_copies(chunk)
        self._shards.filled(chunk)
        self.versions.publish(chunk)
        self.begin_gathers([chunk])
        self._finish_gathers([chunk])

    def keep_written(self, managed: ManagedParam, values: torch.Tensor) -> None:
        """Brings what user code has made of the parameter home. For one rank.

        Values of other parameters in the chunk stay as they are, and so do graphs that use them.
        """
        with self.shard(managed.chunk) as shard:
            self._updates.begin_write(managed.chunk)
            managed.part_of(shard).copy_(values)
            self._shards.filled(managed.chunk)

    def discard_copies(self, chunk: Chunk) -> None:
        """Forgets all copies of the chunk, whole and of this rank's shard; home has its values."""
        self.drop_copies(chunk)
        self._shards.invalidate(chunk)

    def drop_copies(self, chunk: Chunk) -> None:
        """Forgets the chunk's whole copies, once none is being made any more."""
        for drop in self._copies.drops:
            drop(chunk.id)

    # Updates

    def begin_update(self, chunk: Chunk, members: Sequence[ManagedParam]) -> None:
        """An update of `members`, parameters of the chunk, is about to be submitted.

        No copy of old values is left. The parameters are UPDATING until finish_updates(), unless
        they are in use, or step() waits for such updates before anything can use them.
        """
        self._updates.wait_copied(chunk)
        self.versions.change(chunk)
        self.discard_copies(chunk)
        self._updates.submit(chunk)
        if not self._updates.goes_on(chunk) or any(m.uses for m in members):
            self._awaited.add(chunk.id)
            for m in members:
                m.note_update()
            return
        self._updating[chunk.id] = members
        for m in members:
            m.begin_update()
        if not self._detach_home(chunk):
            self._awaited.add(chunk.id)

    def _detach_home(self, chunk: Chunk) -> bool:
        """Whether no tensor views the chunk's home, whose parameters are UPDATING."""
        return not self.is_resident(chunk) or self._homes.release_view(chunk, collect=False)

    def is_awaited(self, chunk: Chunk) -> bool:
        """Whether step() waits for the chunk's update: something has its memory in hands."""
        return chunk.id in self._awaited

    def begin_speculation(self, chunk: Chunk, members: Sequence[ManagedParam]) -> bool:
        """A speculative update of `members` may be about to begin: they are UPDATING.

        Returns False, with nothing changed, if another tensor views the chunk's home: it would see
        values that step() may not confirm.
        """
        self._updates.wait_copied(chunk)
        for m in members:
            m.begin_update(revocable=True)
        if not self._detach_home(chunk):
            home = self.home(chunk)
            for m in members:
                m.revoke_update(home)
            return False
        self.drop_copies(chunk)  # a device may be copying from it
        return True

    def decide(self, chunk: Chunk, confirmed: bool) -> None:
        """The chunk's speculative update stays, or is about to be submitted once more."""
        self.versions.change(chunk)
        self.discard_copies(chunk)  # also of old values that were read while it was prepared
        self._updating[chunk.id] = self._updates.decide(chunk, confirmed)
        if not self._updates.goes_on(chunk):
            self._awaited.add(chunk.id)

    def undo_update(self, chunk: Chunk, members: Sequence[ManagedParam]) -> None:
        """The chunk's last update, of `members`, is undone: its old state comes back.

        It is finished, and nobody uses the parameters. For those who have values or graphs this is
        a write. Then all ranks call finish_undo(). Raises NativeIoError.
        """
        self._updates.wait_copied(chunk)
        self.versions.change(chunk)
        self.discard_copies(chunk)
        self._updates.bring_old_state(chunk)
        for m in members:
            m.undo_update()
        self.versions.publish(chunk)

    def finish_undo(self, chunks: Iterable[Chunk]) -> None:
        """Returns when the old values are everywhere, after undo_update() of all chunks."""
        self.begin_gathers(chunks)
        self._finish_gathers(chunks)

    def publish(self, chunk: Chunk) -> None:
        """The update is submitted: other ranks may ask for new values, and wait for it here."""
        self.versions.publish(chunk)

    def finish_updates(self, chunks: Sequence[Chunk]) -> None:
        """Waits for the updates of `chunks` that are under way; parameters get the new values.

        Raises what an update met; this can be called again then.
        """
        chunks = [chunk for chunk in chunks if self._updates.is_under_way(chunk)]
        for chunk in chunks:
            self._updates.wait_updated(chunk)
        self._finish_gathers(chunks)
        for chunk in chunks:
            self._end_update(chunk)
            self._updates.finish(chunk)  # last, so that all of it is done again after Ctrl-C

    def _end_update(self, chunk: Chunk) -> None:
        """Gives UPDATING parameters their new values."""
        home = self.home(chunk)
        for m in self._updating.get(chunk.id, []):
            m.end_update(home)
        self._updating.pop(chunk.id, None)
        self._awaited.discard(chunk.id)

    def _wait_usable(self, chunk: Chunk) -> None:
        """Until the chunk's parameters have their values. Raises as flat()."""
        self._updates.revoke(chunk)
        self._updates.note_use(chunk)
        if self._updates.is_under_way(chunk):
            with timeline.span("gather"), mark("hetero::wait_update"):
                self.finish_updates([chunk])

    def _is_being_updated(self, chunk_id: int) -> bool:
        """Whether the chunk cannot be read from its home without waiting."""
        chunk = self._layout.chunks[chunk_id]
        if self._gathering is not None and self._homes.whole:
            # (Other ranks' parts come when the update is finished.)
            return self._updates.state(chunk) not in (UpdateState.NO_GRADS, UpdateState.GRADS_FINAL)
        return not self._updates.is_readable(chunk)

    def begin_gathers(self, chunks: Iterable[Chunk]) -> None:
        """Where homes are whole (stages 1 and 2) the other ranks' new values start to come in.

        They come when the updates are made. All ranks call this with the same chunks.
        """
        if self._gathering is not None and self._homes.whole:
            for chunk in sorted(chunks, key=lambda chunk: chunk.id):
                whole = self._homes.flat(chunk)
                self._whole_gathers[chunk.id] = self._gathering.start(chunk, whole)

    def _finish_gathers(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            gather = self._whole_gathers.get(chunk.id)
            if gather is not None:
                gather.wait()
                self._whole_gathers.pop(chunk.id, None)

    def wait_gathers_quietly(self) -> None:
        """Waits until what begin_gathers() has started is made, or has failed."""
        for gather in self._whole_gathers.values():
            wait_quietly(gather)

    def finish_transfers(self) -> None:
        """Waits until nothing that was asked of other ranks is under way."""
        if self._gathering is not None:
            self._cache.finish_transfers()

    def pack(self, tensor: torch.Tensor) -> SavedView | None:
        """How to make `tensor` again if it is a view of a gathered copy; else None."""
        if tensor.dtype is not self._dtype:
            return None
        slot = self._arena.slot_of(tensor.untyped_storage().data_ptr())
        if slot is None:
            return None
        chunk, offset = self._chunk_of_slot[slot], int(tensor.storage_offset())
        version = self._version(chunk, offset)
        return SavedView(chunk, version, tensor.size(), tensor.stride(), offset)

    def _version(self, chunk: Chunk, offset: int) -> tuple[int, int]:
        """Differs after a change of the parameter that has the element at `offset`."""
        members = self._members[chunk.id]
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

    def shrink(self) -> None:
        """Gives up the slots beyond the soft limit, which are used only while RAM is free."""
        self._cache.shrink()

    def drop_all_copies(self) -> None:
        """Forgets all copies of all chunks; none may be in use. Raises what a transfer met."""
        for cache in self._copies.clearable:
            cache.clear()

    def note_gathered_slots(self) -> None:
        """The slots where compute happens are as many as before again, after they were fewer."""
        self._cache.refit()

    def note_slots(self, gathered_slots: int) -> None:
        """The arenas have other sizes than before, and homes have moved; no copy is in use.

        `gathered_slots` is the limit of gathered copies, soft if they may use more while RAM is
        free.
        """
        assert not self._used
        for cache in self._copies.clearable:
            cache.refit()
        if self._copies.has_soft_limit:
            self._cache.refit(gathered_slots)
        self._chunk_of_slot.clear()
        self.order.use_in_place([c.id for c in self._layout.chunks if self.is_resident(c)])

    def pinned_copies(self) -> int:
        """Gathered copies that some tensor views now."""
        return self._arena.live_views()

    def stop(self) -> None:
        """Ends what is under way; nothing can be gathered any more."""
        if self._gathering is not None:
            self._gathering.stream.abandon()
        self._cache.close()

    def close(self) -> None:
        """Drops the pins on gathered copies; the engine is closing."""
        self._used.clear()
