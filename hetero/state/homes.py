"""Homes of one kind of state in memory: chunks in RAM or on DEVICE have room there."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hetero.chunks.layout import Chunk, Layout
from offload.device.backend import Backend
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account, Tier


@dataclass(frozen=True)
class _Home:
    """Slots of an arena."""

    tier: Tier
    arena: HostArena
    first: int
    run: int


class Homes:
    """Slots for the chunks that `tiers` puts on HOST or DEVICE, charged when first used.

    `whole`: each slot holds all of a chunk's slot, of which this rank's shard is a part; else it
    holds one tile of the shard alone. For a single rank both are the same.

    A chunk may leave memory (give_up()), and get a second home there (take()) which then becomes
    its home (adopt()). The chunks that begin in RAM are in one arena, whose slots they keep for a
    return; each of the others has an arena of its own, and so have all on DEVICE, because some
    devices give memory back as a whole.
    """

    def __init__(
        self,
        layout: Layout,
        tiers: Sequence[Tier | None],
        slot_bytes: int,
        dtype: torch.dtype,
        ledger: Ledger,
        account: Account,
        backend: Backend,
        whole: bool = False,
    ) -> None:
        """`backend` gives DEVICE's memory; what is charged goes to `account`."""
        self.whole = whole or layout.shard.ranks == 1
        self._shard = layout.shard
        self._slot_bytes = slot_bytes
        self._tile_bytes = slot_bytes if not self.whole else slot_bytes // layout.shard.ranks
        self._ledger = ledger
        self._account = account
        self._backend = backend
        self._dtype = dtype
        self._separate = backend.separate
        self._compute_tier = Tier.DEVICE if backend.separate else Tier.HOST
        # (Optimizer states are no source of copies that the device makes by itself.)
        self._make = HostArena if account is Account.OPTIM_STATE else backend.host_arena
        self._home: dict[int, _Home] = {}
        self._second: dict[int, _Home] = {}
        self._flat: dict[int, torch.Tensor] = {}
        in_ram = [c for c in layout.chunks if tiers[c.id] is Tier.HOST]
        self._common = self._make(sum(c.slots for c in in_ram), slot_bytes, ledger, account)
        self._place: dict[int, _Home] = {}  # there, of those that began there
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

    def _own(self, chunk: Chunk, tier: Tier) -> _Home:
        """An arena for the chunk alone."""
        make = self._make if tier is Tier.HOST else self._backend.arena
        arena = make(chunk.slots, self._slot_bytes, self._ledger, self._account)
        return _Home(tier, arena, 0, chunk.slots)

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk.id in self._home

    def has_in_place(self, chunk: Chunk) -> bool:
        """Whether the chunk's home is where compute happens."""
        home = self._home.get(chunk.id)
        return home is not None and home.tier is self._compute_tier

    def on_device(self, chunk: Chunk) -> bool:
        """Whether the chunk's home is on a DEVICE that has memory of its own."""
        return self._separate and self.has_in_place(chunk)

    def commit(self, chunk: Chunk) -> None:
        """Charges the chunk's slots, if they are not yet."""
        home = self._home[chunk.id]
        home.arena.commit(home.first, home.run)

    def commit_all(self) -> None:
        """Charges all slots that are not charged yet."""
        for home in self._home.values():
            home.arena.commit(home.first, home.run)

    def flat(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's slots as one flat tensor; the same tensor object until let_go()."""
        flat = self._flat.get(chunk.id)
        if flat is None:
            self.commit(chunk)
            home = self._home[chunk.id]
            flat = home.arena.view(home.first, home.run, self._dtype, pinned=True)
            self._flat[chunk.id] = flat
        return flat

    def shard(self, chunk: Chunk) -> torch.Tensor:
        """This rank's shard of the chunk, flat."""
        flat = self.flat(chunk)
        return flat[self._shard.range(flat.numel())] if self.whole else flat

    def address(self, chunk: Chunk, tile: int) -> int:
        """Address of tile number `tile` of this rank's shard."""
        home = self._home[chunk.id]
        address = home.arena.address(home.first)
        if self.whole:
            address += self._shard.rank * chunk.slots * self._tile_bytes
        return address + tile * self._tile_bytes

    # Moving

    def bytes(self, chunk: Chunk, second: bool = False) -> torch.Tensor:
        """The chunk's slots, those of its second home if wanted; for a moment: it is no pin."""
        home = (self._second if second else self._home)[chunk.id]
        home.arena.commit(home.first, home.run)
        return home.arena.view(home.first, home.run, torch.uint8)

    def let_go(self, chunk: Chunk) -> bool:
        """Whether nobody but this object views the chunk's home, which may thus move."""
        self._flat.pop(chunk.id, None)
        home = self._home[chunk.id]
        if home.arena.pins[home.first]:
            gc.collect()  # views may hang in reference cycles, of an exception's frames say
        return not home.arena.pins[home.first]

    def give_up(self, chunk: Chunk) -> None:
        """The chunk's home is in memory no more; its bytes are lost, and the memory is given back.

        Nobody may view it (let_go()).
        """
        home = self._home.pop(chunk.id)
        assert not home.arena.pins[home.first]
        self._give_back(home)

    def _give_back(self, home: _Home) -> None:
        if home.arena is self._common:
            home.arena.decommit(home.first, home.run)
        else:
            home.arena.close()

    def take(self, chunk: Chunk, tier: Tier) -> None:
        """The chunk gets a second home on `tier`, with undefined bytes. Raises BudgetError."""
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

    def adopt(self, chunk: Chunk) -> None:
        """The second home becomes the chunk's; the one that it had, if any, is given up."""
        if chunk in self:
            self.give_up(chunk)
        self._home[chunk.id] = self._second.pop(chunk.id)

    def abandon(self, chunk: Chunk) -> None:
        """Gives the second home back, if there is one."""
        home = self._second.pop(chunk.id, None)
        if home is not None:
            self._give_back(home)

    def close(self) -> None:
        """Gives the memory back once no tensor views it."""
        self._flat.clear()
        for home in (*self._home.values(), *self._second.values()):
            home.arena.close()
        self._common.close()
        self._home.clear()
        self._second.clear()
