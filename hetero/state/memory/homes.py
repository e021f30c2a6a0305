"""Homes: where chunks keep one state kind between steps, in memory or in the file."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Chunk, Layout
from hetero.planning.placement import SlotBytes
from offload._native import Location
from offload.device.backend import Backend
from offload.disk.backing import Extent
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account, StateKind, Tier


@dataclass(frozen=True)
class _Home:
    """`run` slots of an arena, from slot `first`."""

    tier: Tier
    arena: HostArena
    first: int
    run: int


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
        self._slot_bytes: int = getattr(SlotBytes.of(layout, dtypes), state_kind.value)
        self._tile_bytes = shard.numel(self._slot_bytes) if self.whole else self._slot_bytes
        self._ledger = ledger
        self._account = Account[state_kind.name]
        self._backend = backend
        self._compute_tier = Tier.DEVICE if backend.separate else Tier.HOST
        # A device copies by itself from all arenas but those of optimizer state.
        is_copied = state_kind is not StateKind.OPTIM_STATE
        self._make: Callable[..., HostArena] = backend.host_arena if is_copied else HostArena
        self._home: dict[int, _Home] = {}
        self._second: dict[int, _Home] = {}
        self._flat: dict[int, torch.Tensor] = {}
        in_ram = [c for c in layout.chunks if tiers[c.id] is Tier.HOST]
        self._common = self._arena(sum(c.slots for c in in_ram), Tier.HOST)
        self._place: dict[int, _Home] = {}  # slots of `_common`, of the chunks that began there
        first = 0
        for chunk in in_ram:
            self._place[chunk.id] = _Home(Tier.HOST, self._common, first, chunk.slots)
            first += chunk.slots
        self._home.update(self._place)
        try:
            for chunk in layout.chunks:
                if tiers[chunk.id] is Tier.DEVICE:
                    self._home[chunk.id] = self._own(chunk, Tier.DEVICE)
        except BaseException:
            self.close()
            raise

    def _arena(self, slots: int, tier: Tier) -> HostArena:
        if tier is Tier.DEVICE:
            return self._backend.arena(slots, self._slot_bytes, self._ledger, self._account)
        return self._make(slots, self._slot_bytes, self._ledger, self._account)

    def _own(self, chunk: Chunk, tier: Tier) -> _Home:
        """A home in an arena of its own."""
        return _Home(tier, self._arena(chunk.slots, tier), 0, chunk.slots)

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk.id in self._home

    def on_compute_tier(self, chunk: Chunk) -> bool:
        """Whether the chunk's home is where compute happens."""
        home = self._home.get(chunk.id)
        return home is not None and home.tier is self._compute_tier

    def on_device(self, chunk: Chunk) -> bool:
        """Whether the chunk's home is on a DEVICE that has memory of its own."""
        return self._backend.separate and self.on_compute_tier(chunk)

    def is_resident(self, chunk: Chunk) -> bool:
        """Whether the whole chunk's home is where compute happens, which uses it in place."""
        return self.whole and self.on_compute_tier(chunk)

    def commit_all(self) -> None:
        """Charges all slots that are not charged yet. Raises BudgetError."""
        for home in self._home.values():
            home.arena.commit(home.first, home.run)

    def flat(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's slots as one flat tensor, a pin of the home. Raises BudgetError.

        It is the same tensor object until release_view(). It is the whole chunk if homes are
        `whole`, else this rank's shard.
        """
        flat = self._flat.get(chunk.id)
        if flat is None:
            home = self._home[chunk.id]
            home.arena.commit(home.first, home.run)
            with torch.inference_mode(False):  # which may be on where an update is waited for
                flat = home.arena.view(home.first, home.run, self._dtype, pinned=True)
            self._flat[chunk.id] = flat
        return flat

    def resident(self, chunk: Chunk) -> torch.Tensor | None:
        """A resident chunk's home, flat, whether its values are there or not; None for others."""
        return self.flat(chunk) if self.is_resident(chunk) else None

    def shard(self, chunk: Chunk) -> torch.Tensor:
        """This rank's shard of the chunk, flat."""
        flat = self.flat(chunk)
        return flat[self._shard.range(flat.numel())] if self.whole else flat

    def address(self, chunk: Chunk, tile: int) -> int:
        """The address of tile number `tile` of this rank's shard."""
        home = self._home[chunk.id]
        address = home.arena.address(home.first)
        if self.whole:
            address += self._shard.rank * chunk.slots * self._tile_bytes
        return address + tile * self._tile_bytes

    def location(self, chunk: Chunk, tile: int) -> Location:
        """The place of tile number `tile` of this rank's shard, in memory or in the file."""
        if chunk in self:
            return Location(self.address(chunk, tile))
        return Location(file_offset=self.extents[chunk.id].offset + tile * self._tile_bytes)

    # Moving

    def bytes(self, chunk: Chunk, second: bool = False) -> torch.Tensor:
        """The bytes of the chunk's home, or of its second home, flat.

        The tensor is no pin: it must not outlive the move that it is for.
        """
        home = (self._second if second else self._home)[chunk.id]
        home.arena.commit(home.first, home.run)
        return home.arena.view(home.first, home.run, torch.uint8)

    def release_view(self, chunk: Chunk, collect: bool = True) -> bool:
        """Drops the tensor that flat() gave; returns whether no other one views the home.

        `collect`: those do not count that only reference cycles hold; to find them takes long.
        """
        self._flat.pop(chunk.id, None)
        home = self._home[chunk.id]
        if collect and home.arena.pins[home.first]:
            gc.collect()  # the frames of an exception, say
        return not home.arena.pins[home.first]

    def free(self, chunk: Chunk) -> None:
        """Frees the chunk's home, with its bytes. release_view() must have returned True."""
        home = self._home.pop(chunk.id)
        assert not home.arena.pins[home.first]
        self._release(home)

    def _release(self, home: _Home) -> None:
        if home.arena is self._common:
            home.arena.decommit(home.first, home.run)
        else:
            home.arena.close()

    def allocate(self, chunk: Chunk, tier: Tier) -> None:
        """Makes a second home on `tier`, with undefined bytes. Raises BudgetError."""
        assert chunk.id not in self._second
        place = self._place.get(chunk.id)
        home = place if place is not None and tier is Tier.HOST else self._own(chunk, tier)
        assert home is not self._home.get(chunk.id)
        try:
            home.arena.commit(home.first, home.run)
        except BaseException:
            if home is not place:
                home.arena.close()
            raise
        self._second[chunk.id] = home

    def switch(self, chunk: Chunk) -> None:
        """Makes the second home the chunk's home; frees the one that it had, if any."""
        if chunk in self:
            self.free(chunk)
        self._home[chunk.id] = self._second.pop(chunk.id)

    def free_second(self, chunk: Chunk) -> None:
        """Frees the second home, if there is one."""
        home = self._second.pop(chunk.id, None)
        if home is not None:
            self._release(home)

    def close(self) -> None:
        """Frees all homes; the memory goes when the last tensor over it does."""
        self._flat.clear()
        for home in (*self._home.values(), *self._second.values()):
            home.arena.close()
        self._common.close()
        self._home.clear()
        self._second.clear()
