"""Homes of one payload in memory: chunks in RAM or on DEVICE have room there from the start."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch

from hetero.layout import Chunk, Layout
from offload.arena import HostArena
from offload.backend import Backend
from offload.ledger import Ledger
from offload.tiers import Account, Tier


class Homes:
    """Slots for the chunks that `tiers` puts on HOST or DEVICE, charged when first used.

    `whole`: each slot holds all of a chunk's slot, of which this rank's shard is a part; else it
    holds one piece of the shard alone. For a single rank both are the same.

    A chunk may leave RAM (give_up()) and come there (take()). The chunks that begin in RAM are in
    one arena, whose slots they keep for a return; each of the others gets an arena of its own.
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
        self._piece_bytes = slot_bytes if not self.whole else slot_bytes // layout.shard.ranks
        self._ledger = ledger
        self._account = account
        self._tier: dict[int, Tier] = {}
        self._first: dict[int, int] = {}
        slots = {Tier.HOST: 0, Tier.DEVICE: 0}
        for chunk in layout.chunks:
            tier = tiers[chunk.id]
            if tier is Tier.HOST or tier is Tier.DEVICE:
                self._tier[chunk.id] = tier
                self._first[chunk.id] = slots[tier]
                slots[tier] += chunk.slots
        self._dtype = dtype
        self._separate = backend.separate
        self._compute_tier = Tier.DEVICE if backend.separate else Tier.HOST
        self._arenas: dict[Tier, HostArena] = {}
        # (Records are the only payload that never crosses the link.)
        self._make = HostArena if account is Account.RECORD else backend.host_arena
        if slots[Tier.HOST]:
            self._arenas[Tier.HOST] = self._make(slots[Tier.HOST], slot_bytes, ledger, account)
        if slots[Tier.DEVICE]:
            self._arenas[Tier.DEVICE] = backend.arena(
                slots[Tier.DEVICE], slot_bytes, ledger, account
            )
        self._own: dict[int, HostArena] = {}  # of chunks that came to RAM later
        self._flat: dict[int, torch.Tensor] = {}

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk.id in self._tier

    def has_in_place(self, chunk: Chunk) -> bool:
        """Whether the chunk's home is where compute happens."""
        return self._tier.get(chunk.id) is self._compute_tier

    def _place(self, chunk: Chunk) -> tuple[HostArena, int]:
        """The arena and the first slot there."""
        own = self._own.get(chunk.id)
        if own is not None:
            return own, 0
        return self._arenas[self._tier[chunk.id]], self._first[chunk.id]

    def on_device(self, chunk: Chunk) -> bool:
        """Whether the chunk's home is on a DEVICE that has memory of its own."""
        return self._separate and self.has_in_place(chunk)

    def commit(self, chunk: Chunk) -> None:
        """Charges the chunk's slots, if they are not yet."""
        arena, first = self._place(chunk)
        arena.commit(first, chunk.slots)

    def commit_all(self) -> None:
        """Charges all slots that are not charged yet."""
        for arena in self._arenas.values():
            arena.commit(0, arena.slots)

    def flat(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's slots as one flat tensor; the same tensor object until let_go()."""
        flat = self._flat.get(chunk.id)
        if flat is None:
            self.commit(chunk)
            arena, first = self._place(chunk)
            leased = self._tier[chunk.id] is Tier.HOST
            flat = arena.view(first, chunk.slots, self._dtype, leased)
            self._flat[chunk.id] = flat
        return flat

    def shard(self, chunk: Chunk) -> torch.Tensor:
        """This rank's shard of the chunk, flat."""
        flat = self.flat(chunk)
        return flat[self._shard.range(flat.numel())] if self.whole else flat

    def address(self, chunk: Chunk, piece: int) -> int:
        """Address of piece number `piece` of this rank's shard."""
        arena, first = self._place(chunk)
        address = arena.address(first)
        if self.whole:
            address += self._shard.rank * chunk.slots * self._piece_bytes
        return address + piece * self._piece_bytes

    # Moving

    def let_go(self, chunk: Chunk) -> bool:
        """Whether nobody but this object views the chunk's home in RAM, which may thus move."""
        self._flat.pop(chunk.id, None)
        arena, first = self._place(chunk)
        if arena.leases[first]:
            gc.collect()  # views may hang in reference cycles, of an exception's frames say
        return not arena.leases[first]

    def give_up(self, chunk: Chunk) -> None:
        """The chunk's home is in RAM no more; its bytes there are lost, its memory is given back.

        Nobody may view it (let_go()).
        """
        arena, first = self._place(chunk)
        assert self._tier[chunk.id] is Tier.HOST
        assert not arena.leases[first]
        if chunk.id in self._own:
            self._own.pop(chunk.id).close()
        else:
            arena.decommit(first, chunk.slots)
        del self._tier[chunk.id]

    def take(self, chunk: Chunk) -> None:
        """The chunk gets a home in RAM, with undefined bytes. Raises BudgetError."""
        assert chunk.id not in self._tier
        if chunk.id in self._first:
            self._arenas[Tier.HOST].commit(self._first[chunk.id], chunk.slots)
        else:
            own = self._make(chunk.slots, self._slot_bytes, self._ledger, self._account)
            own.commit(0, chunk.slots)
            self._own[chunk.id] = own
        self._tier[chunk.id] = Tier.HOST

    def close(self) -> None:
        """Gives the memory back once no tensor views it."""
        self._flat.clear()
        for arena in (*self._arenas.values(), *self._own.values()):
            arena.close()
        self._arenas.clear()
        self._own.clear()
        self._tier.clear()
