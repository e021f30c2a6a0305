"""PARAM kinds of state: resident where compute happens, or gathered there while needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

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
        self._order.note(chunk.id)
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

    def fill(self, chunk: Chunk) -> AbstractContextManager[torch.Tensor]:
        """Flat memory, in the block, for the first values of this rank's shard.

        Call filled() in the block when they are there.

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
        self._version.change(chunk)
        self.drop_copies(chunk)
        self._shards.filled(chunk)
        self.changed([chunk])

    def invalidate(self, chunk: Chunk) -> None:
        """The optimizer is about to write new values to the shard's home."""
        self._version.change(chunk)
        self.drop_copies(chunk)
        self._shards.invalidate(chunk)

    def drop_copies(self, chunk: Chunk) -> None:
        """Forgets copies of the chunk, once none is being made any more."""
        for drop in self._drops:
            drop(chunk.id)

    def changed(self, chunks: Iterable[Chunk]) -> None:
        """The shards have their new values: other ranks may have them, and theirs come in."""
        chunks = list(chunks)
        for chunk in chunks:
            self._version.publish(chunk)
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
