"""PARAM kinds of state: resident where compute happens, or gathered there while needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from hetero.chunks.layout import Chunk, Layout
from hetero.overlap import OverlapUpdates
from hetero.ranks.shard_server import Versions
from hetero.state.all_gather import Gather, Gathering
from hetero.state.chunk_updates import ChunkUpdates
from hetero.state.homes import Homes
from hetero.state.managed_param import ManagedParam
from hetero.state.param_shards import ParamShards
from offload import timeline
from offload.cache.slot_cache import SlotCache
from offload.cache.use_order import UseOrder
from offload.errors import HeteroError, StaleGraphError
from offload.memory.arena import HostArena

_PREFETCH_CHUNKS = 4  # looked ahead; how many are really read is a matter of free slots


@dataclass(frozen=True)
class SavedView:
    """A view of a gathered copy that autograd saved: enough to make it again."""

    chunk: Chunk
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # elements from the chunk's beginning


class Params:
    """Brings one chunk group's parameters in and lets them go.

    A resident parameter is a view of its home for good: one in RAM if compute happens there, one on
    DEVICE if not. Of the others, `acquire` points the
    parameter to a gathered copy and `release` makes it absent again; copies stay pinned while any
    tensor over them lives, whoever holds it.
    """

    def __init__(
        self,
        layout: Layout,
        homes: Homes,
        shards: ParamShards,
        arena: HostArena,
        cache: SlotCache | None,
        order: UseOrder,
        dtype: torch.dtype,
        prefetch: bool,
        versions: Versions,
        gathering: Gathering | None,
        drops: Sequence[Callable[[int], object]],
        updates: ChunkUpdates,
    ) -> None:
        """`shards` are this rank's parts; `cache` has the gathered copies, in `arena`.

        `gathering` is there for several ranks. `drops` forget copies of a chunk that `shards` knows
        nothing of, in this order.
        """
        self._layout = layout
        self._homes = homes
        self._shards = shards
        self._arena = arena
        self._cache = cache
        self._order = order
        self._dtype = dtype
        self._prefetch = prefetch
        self._version = versions
        self._gathering = gathering
        self._drops = drops
        self._resident_uses = 0  # acquire() calls that changed nothing
        self._chunk_of_slot: dict[int, Chunk] = {}
        self._held: dict[int, torch.Tensor] = {}  # gathered copies that parameters point to
        self._holders: dict[int, int] = {}
        self._updates = updates
        # Resident parameters that read NaN until their update is waited for, by chunk id.
        self._detached: dict[int, list[ManagedParam]] = {}

    @property
    def gathers(self) -> bool:
        """Whether some parameters are gathered, and pack() and unpack() are needed."""
        return self._arena.slots > 0

    @property
    def wait_s(self) -> float:
        """Seconds for which copies that were needed have been waited for."""
        return 0.0 if self._cache is None else self._cache.wait_s

    @property
    def in_use(self) -> bool:
        """Whether some parameters are gathered, or in a block that says so, now."""
        return bool(self._held) or self._resident_uses > 0 or self.pinned_copies() > 0

    def is_resident(self, chunk: Chunk) -> bool:
        """Whether the whole chunk's home is where compute happens, which uses it in place."""
        return self._homes.whole and self._homes.has_in_place(chunk)

    def flat(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's parameters now, flat; unless resident a pin on a gathered copy.

        Waits for the chunk's update, and raises what it met.
        """
        self._wait_usable(chunk, chunk.name)
        if self.is_resident(chunk):
            return self._homes.flat(chunk)
        held = self._held.get(chunk.id)
        if held is not None:
            return held
        assert self._cache is not None
        self._order.note(chunk.id)
        with timeline.span("gather"):
            self._cache.get(chunk.id)
        flat = self._pin(chunk)
        if self._prefetch:
            # Reading what is not written yet would make compute wait for chunks that it does not
            # need now.
            self._cache.prefetch(_PREFETCH_CHUNKS, self._is_being_updated)
        return flat

    def _pin(self, chunk: Chunk) -> torch.Tensor:
        assert self._cache is not None
        slot = self._arena.slot_of(self._cache.address(chunk.id))
        assert slot is not None
        self._chunk_of_slot[slot] = chunk
        return self._cache.tensor(chunk.id, self._dtype)

    def acquire(self, managed: ManagedParam) -> None:
        """Makes the parameter present until as many release() calls.

        Waits for its update. Raises what that met, and HeteroError for a parameter that was updated
        during backward and must not be used before step().
        """
        chunk = managed.chunk
        self._wait_usable(chunk, managed.name)
        if self.is_resident(chunk):
            self._resident_uses += 1
            managed.uses += 1
            return
        if managed.uses == 0:
            flat = self.flat(chunk)
            self._held[chunk.id] = flat
            self._holders[chunk.id] = self._holders.get(chunk.id, 0) + 1
            managed.param.data = managed.part_of(flat)
        managed.uses += 1

    def release(self, managed: ManagedParam) -> None:
        """Undoes one acquire()."""
        chunk = managed.chunk
        if self.is_resident(chunk):
            self._resident_uses -= 1
            managed.uses -= 1
            return
        managed.uses -= 1
        if managed.uses == 0:
            managed.param.data = managed.absent
            changed = managed.changed_unnoticed
            managed.note_change()
            self._holders[chunk.id] -= 1
            if self._holders[chunk.id] == 0:
                del self._holders[chunk.id], self._held[chunk.id]
            if changed:
                raise HeteroError(
                    f"{managed.name} was changed in place where only reading is possible; change "
                    f"it inside hetero.gathered(..., modifier_rank=0)"
                )

    def is_in_place(self, managed: ManagedParam) -> bool:
        """Whether the parameter is where it belongs between steps: at home, or absent."""
        if managed in self._detached.get(managed.chunk.id, ()):
            expected = managed.absent.data_ptr()
        elif self.is_resident(managed.chunk):
            offset = managed.slice.offset * self._dtype.itemsize
            expected = self._homes.flat(managed.chunk).data_ptr() + offset
        else:
            expected = managed.absent.data_ptr()
        return managed.param.data_ptr() == expected

    def fill(self, chunk: Chunk) -> torch.Tensor:
        """Flat memory for the first values of this rank's shard; call filled() when they are there.

        All ranks must do so.
        """
        self._wait_usable(chunk, chunk.name)
        return self._shards.fill(chunk)

    def shard(self, chunk: Chunk) -> AbstractContextManager[torch.Tensor]:
        """This rank's shard inside the block. If it was changed, call filled() in the block."""
        self._wait_usable(chunk, chunk.name)
        self.drop_copies(chunk)  # a device may be copying from it
        return self._shards.open(chunk)

    def filled(self, chunk: Chunk) -> None:
        """The shard's values changed; returns when they are home, and whole where they must be.

        All ranks must do so.
        """
        self._version.change(chunk)
        self.drop_copies(chunk)
        self._shards.filled(chunk)
        self._version.publish(chunk)
        self._gather_whole([chunk])

    def drop_copies(self, chunk: Chunk) -> None:
        """Forgets copies of the chunk, once none is being made any more."""
        for drop in self._drops:
            drop(chunk.id)

    # Updates

    def begin_update(self, chunk: Chunk, members: list[ManagedParam], lock: bool) -> None:
        """An update of `members`, parameters of the chunk, is about to be submitted.

        No copy of old values is left. Where updates overlap with anything but step(), the
        parameters read NaN until finish_updates(). `lock`: they must not be used before step().
        """
        self._version.change(chunk)
        self.drop_copies(chunk)
        self._shards.invalidate(chunk)
        self._updates.submit(chunk, members, lock)
        resident = self.is_resident(chunk)
        if resident and self._updates.overlap is not OverlapUpdates.NONE:
            self._detached[chunk.id] = members
        for m in members:
            if resident:
                # As an in-place update does: a backward over older values then fails.
                torch.autograd.graph.increment_version(m.param)
            if chunk.id in self._detached:
                m.param.data = m.absent
            m.note_change()

    def publish(self, chunk: Chunk) -> None:
        """The update is submitted: other ranks may ask for new values, and wait for it here."""
        self._version.publish(chunk)

    def finish_updates(self, chunks: Sequence[Chunk]) -> None:
        """Waits for the updates of `chunks` that are under way, and attaches parameters to the new
        values.

        Raises what an update met; then this can be called again. Raises HeteroError for a parameter
        that was changed while it had no value.
        """
        chunks = [chunk for chunk in chunks if self._updates.is_under_way(chunk)]
        for chunk in chunks:
            self._updates.wait_updated(chunk)
        self._gather_whole(chunks)
        changed: list[str] = []
        for chunk in chunks:
            changed += self._attach(chunk)
            self._updates.finish(chunk)  # last, so that all of it is done again after Ctrl-C
        if changed:
            raise HeteroError(
                f"{changed[0]} was changed, moved or converted while its update was under way; "
                f"that change is lost, and the parameter has its updated value; change it inside "
                f"hetero.gathered(..., modifier_rank=0)"
            )

    def _attach(self, chunk: Chunk) -> list[str]:
        """Points parameters to their home again; returns those that were changed meanwhile."""
        changed: list[str] = []
        if chunk.id not in self._detached:
            return changed
        flat = self._homes.flat(chunk)
        with torch._C.DisableTorchFunction():  # BareUses would take this for a use
            for m in self._detached[chunk.id]:
                part = m.part_of(flat)
                if m.param.data_ptr() == part.data_ptr():
                    continue  # Ctrl-C came when it was there
                if m.was_written_while_absent():
                    changed.append(m.name)
                m.param.data = part
                m.note_change()
        del self._detached[chunk.id]
        return changed

    def _wait_usable(self, chunk: Chunk, name: str) -> None:
        """Until parameter `name` of the chunk has its new value. Raises as acquire()."""
        self._updates.require_usable(chunk, name)
        self._updates.note_use(chunk)
        if self._updates.is_under_way(chunk):
            with timeline.span("gather"):
                self.finish_updates([chunk])

    def _is_being_updated(self, chunk_id: int) -> bool:
        """Whether the chunk cannot be read from its home without waiting."""
        return not self._updates.is_readable(self._layout.chunks[chunk_id])

    def _gather_whole(self, chunks: Iterable[Chunk]) -> None:
        """Where homes are whole (stages 1 and 2), the other ranks' new shards come in."""
        if self._gathering is None or not self._homes.whole:
            return
        under_way: list[Gather] = []
        for chunk in chunks:
            under_way.append(self._gathering.gather(chunk, self._homes.flat(chunk)))
            if len(under_way) == _PREFETCH_CHUNKS:
                under_way.pop(0).wait()
        for gather in under_way:
            gather.wait()

    def settle(self) -> None:
        """Until nothing that was asked of other ranks is under way."""
        if self._gathering is not None and self._cache is not None:
            self._cache.settle()

    def pack(self, tensor: torch.Tensor) -> SavedView | None:
        """How to remake `tensor`, if it is a view of a gathered copy of this chunk group."""
        if tensor.dtype is not self._dtype:
            return None
        slot = self._arena.slot_of(tensor.untyped_storage().data_ptr())
        if slot is None:
            return None
        chunk = self._chunk_of_slot[slot]
        return SavedView(
            chunk,
            self._version[chunk],
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
        )

    def unpack(self, saved: SavedView) -> torch.Tensor:
        """The tensor that was packed. Raises StaleGraphError if it was changed since."""
        self._updates.require_unchanged(saved.chunk)
        if saved.version != self._version[saved.chunk]:
            raise StaleGraphError(
                f"backward needs {saved.chunk.name} as it was before an optimizer step that came "
                f"between this graph's forward and its backward; call backward before step"
            )
        return self.flat(saved.chunk).as_strided(saved.size, saved.stride, saved.offset)

    def shrink(self) -> None:
        """Gives up slots that are used only when there is RAM to spare."""
        if self._cache is not None:
            self._cache.shrink()

    def refit(self) -> None:
        """The slots for gathered copies are others than before; none was in use."""
        assert not self._held
        self._chunk_of_slot.clear()
        self._order.use_in_place([c.id for c in self._layout.chunks if self.is_resident(c)])

    def pinned_copies(self) -> int:
        """Gathered copies that some tensor views now."""
        return self._arena.live_views()

    def stop(self) -> None:
        """Ends what is under way: nothing will be gathered any more."""
        if self._cache is not None:
            self._cache.close()

    def forget(self) -> None:
        """Lets go of all gathered copies; the engine is closing."""
        self._held.clear()
        self._holders.clear()
