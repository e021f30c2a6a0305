"""PARAM kinds of state: resident where compute happens, or gathered there while needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from hetero.chunks.layout import Chunk, Layout
from hetero.ranks.shard_server import Versions
from hetero.state.all_gather import Gather, Gathering
from hetero.state.homes import Homes
from hetero.state.managed_param import ManagedParam
from hetero.state.param_shards import ParamShards
from offload import timeline
from offload.cache.slot_cache import SlotCache
from offload.cache.use_order import UseOrder
from offload.errors import HeteroError, StaleGraphError
from offload.memory.arena import HostArena

_PREFETCH_CHUNKS = 4  # looked ahead; how many are really read is a matter of free slots


def _never(_: object) -> bool:
    return False


def _nothing(_: object) -> None:
    pass


@dataclass(frozen=True)
class SavedView:
    """A view of a gathered copy that autograd saved: enough to make it again."""

    chunk: Chunk
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # elements from the chunk's beginning


class CopyCache(Protocol):
    """A cache of copies of parameters, or what fills one."""

    def clear(self) -> None:
        """Forgets all copies. Raises what a transfer met."""

    def refit(self) -> None:
        """The arena was resized while it held no copy."""


@dataclass(frozen=True)
class ParamCopies:
    """Copies of parameters between their homes and compute.

    `cache` (None: none is ever gathered) has those that compute uses, in `arena`, flat and whole in
    `dtype`. `clearable` are all caches on the way, nearest to compute first, those of shards
    included; `drops` forget one chunk's whole copies, in this order. `has_soft_limit`: the cache
    may use more slots than Placement.gathered_slots while RAM is free.
    """

    arena: HostArena
    cache: SlotCache | None
    order: UseOrder
    dtype: torch.dtype
    clearable: Sequence[CopyCache]
    drops: Sequence[Callable[[int], object]]
    has_soft_limit: bool


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
        copies: ParamCopies,
        prefetch: bool,
        versions: Versions,
        gathering: Gathering | None,
    ) -> None:
        """Access to one chunk group's parameters.

        Args:
            homes: the chunks that are at home in RAM or on DEVICE.
            shards: this rank's shards, wherever they are at home.
            copies: the gathered copies.
            prefetch: whether to gather the chunks that are expected next ahead of their use.
            versions: count the changes of each chunk, and tell other ranks of them.
            gathering: makes whole chunks from all ranks' shards; None for one rank.
        """
        self._layout = layout
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
        self._resident_uses = 0  # acquire() calls that changed nothing
        self._chunk_of_slot: dict[int, Chunk] = {}
        self._held: dict[int, torch.Tensor] = {}  # gathered copies that parameters point to
        self._holders: dict[int, int] = {}
        # Called before a chunk's values are used or changed: waits until they are there.
        self.before_use: Callable[[Chunk], object] = _nothing
        # By id, whether that would take time: then nothing is read ahead.
        self.is_changing: Callable[[int], bool] = _never

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

    def home(self, chunk: Chunk) -> torch.Tensor:
        """A resident chunk's home, flat, whether its values are there or not."""
        return self._homes.flat(chunk)

    def flat(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's parameters now, flat; unless resident a pin on a gathered copy."""
        self.before_use(chunk)
        if self.is_resident(chunk):
            return self._homes.flat(chunk)
        held = self._held.get(chunk.id)
        if held is not None:
            return held
        assert self._cache is not None
        self.order.note(chunk.id)
        with timeline.span("gather"):
            self._cache.get(chunk.id)
        flat = self._pin(chunk)
        if self._prefetch:
            self._cache.prefetch(_PREFETCH_CHUNKS, self.is_changing)
        return flat

    def _pin(self, chunk: Chunk) -> torch.Tensor:
        assert self._cache is not None
        slot = self._arena.slot_of(self._cache.address(chunk.id))
        assert slot is not None
        self._chunk_of_slot[slot] = chunk
        return self._cache.tensor(chunk.id, self._dtype)

    def acquire(self, managed: ManagedParam) -> None:
        """Makes the parameter present until as many release() calls."""
        chunk = managed.chunk
        if self.is_resident(chunk):
            self.before_use(chunk)
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
        if self.is_resident(managed.chunk):
            offset = managed.slice.offset * self._dtype.itemsize
            expected = self._homes.flat(managed.chunk).data_ptr() + offset
        else:
            expected = managed.absent.data_ptr()
        return managed.param.data_ptr() == expected

    def fill(self, chunk: Chunk) -> torch.Tensor:
        """Flat memory for the first values of this rank's shard; call filled() when they are there.

        All ranks must do so.
        """
        self.before_use(chunk)
        return self._shards.fill(chunk)

    def shard(self, chunk: Chunk) -> AbstractContextManager[torch.Tensor]:
        """This rank's shard inside the block. If it was changed, call filled() in the block."""
        self.before_use(chunk)
        self.drop_copies(chunk)  # a device may be copying from it
        return self._shards.open(chunk)

    def filled(self, chunk: Chunk) -> None:
        """The shard's values changed; returns when they are home, and whole where they must be.

        All ranks must do so.
        """
        self.versions.change(chunk)
        self.drop_copies(chunk)
        self._shards.filled(chunk)
        self.changed([chunk])

    def invalidate(self, chunk: Chunk) -> None:
        """The optimizer is about to write new values to the shard's home."""
        self.versions.change(chunk)
        self.drop_copies(chunk)
        self._shards.invalidate(chunk)

    def drop_copies(self, chunk: Chunk) -> None:
        """Forgets copies of the chunk, once none is being made any more."""
        for drop in self._copies.drops:
            drop(chunk.id)

    def changed(self, chunks: Iterable[Chunk]) -> None:
        """The shards have their new values: other ranks may have them, and theirs come in."""
        chunks = list(chunks)
        for chunk in chunks:
            self.versions.publish(chunk)
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
            self.versions[chunk],
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
        )

    def unpack(self, saved: SavedView) -> torch.Tensor:
        """The tensor that was packed. Raises StaleGraphError if it was changed since."""
        if saved.version != self.versions[saved.chunk]:
            raise StaleGraphError(
                f"backward needs {saved.chunk.name} as it was before an optimizer step that came "
                f"between this graph's forward and its backward; call backward before step"
            )
        return self.flat(saved.chunk).as_strided(saved.size, saved.stride, saved.offset)

    def shrink(self) -> None:
        """Gives up the slots beyond the soft limit, which are used only while RAM is free."""
        if self._cache is not None:
            self._cache.shrink()

    def drop_all_copies(self) -> None:
        """Forgets all copies of all chunks; none may be in use. Raises what a transfer met."""
        for cache in self._copies.clearable:
            cache.clear()

    def note_gathered_slots(self) -> None:
        """The slots where compute happens are as many as before again, after they were fewer."""
        if self._cache is not None:
            self._cache.refit()

    def note_slots(self, gathered_slots: int) -> None:
        """The arenas have other sizes than before, and homes have moved; no copy is in use.

        Args:
            gathered_slots: as the placement says: the soft limit of gathered copies, if they may
                use more while RAM is free.
        """
        assert not self._held
        for cache in self._copies.clearable:
            cache.refit()
        if self._copies.has_soft_limit:
            assert self._cache is not None
            self._cache.refit(gathered_slots)
        self._chunk_of_slot.clear()
        self.order.use_in_place([c.id for c in self._layout.chunks if self.is_resident(c)])

    def pinned_copies(self) -> int:
        """Gathered copies that some tensor views now."""
        return self._arena.live_views()

    def stop(self) -> None:
        """Ends what is under way: nothing will be gathered any more."""
        if self._cache is not None:
            self._cache.close()

    def close(self) -> None:
        """Drops the pins on gathered copies; the engine is closing."""
        self._held.clear()
        self._holders.clear()
