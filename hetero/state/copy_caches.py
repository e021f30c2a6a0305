"""The copies of parameters between their homes and compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hetero.chunks.layout import Chunk
from hetero.state.gathering.own_shards import OwnShards
from offload.cache.slot_cache import SlotCache
from offload.cache.use_order import UseOrder
from offload.memory.arena import HostArena


class CopyCache(Protocol):
    """A cache of copies of parameters, or what fills one."""

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
        clearable: all caches, the one nearest to compute first, that of shards included.
        drops: forget one chunk's whole copies, in this order.
        shards: this rank's part, whose copies are of the file.
        has_soft_limit: the cache may use more slots than Placement.gathered_slots while RAM is
            free.
    """

    arena: HostArena
    cache: SlotCache
    order: UseOrder
    dtype: torch.dtype
    clearable: Sequence[CopyCache]
    drops: Sequence[Callable[[int], object]]
    shards: OwnShards
    has_soft_limit: bool

    def discard(self, chunk: Chunk) -> None:
        """Forgets all copies of the chunk, whole and of this rank's shard; home has its values."""
        self.drop(chunk)
        self.shards.invalidate(chunk)

    def drop(self, chunk: Chunk) -> None:
        """Forgets the chunk's whole copies, once none is being made any more."""
        for drop in self.drops:
            drop(chunk.id)

    def clear(self) -> None:
        """Forgets all copies of all chunks; none may be in use. Raises what a transfer met."""
        for cache in self.clearable:
            cache.clear()

    def refit(self, gathered_slots: int) -> None:
        """The arenas have other sizes than before; no copy is in use.

        `gathered_slots` is the limit of gathered copies, soft if they may use more while RAM is
        free.
        """
        for cache in self.clearable:
            cache.refit()
        if self.has_soft_limit:
            self.cache.refit(gathered_slots)

    def pinned(self) -> int:
        """Gathered copies that some tensor views now."""
        return self.arena.live_views()
