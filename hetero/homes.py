"""Homes of one payload in memory: chunks in RAM or on DEVICE have room there from the start."""

from __future__ import annotations

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
        self._piece_bytes = slot_bytes if not self.whole else slot_bytes // layout.shard.ranks
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
        if slots[Tier.HOST]:
            # (Records are the only payload that never crosses the link.)
            make = HostArena if account is Account.RECORD else backend.host_arena
            self._arenas[Tier.HOST] = make(slots[Tier.HOST], slot_bytes, ledger, account)
        if slots[Tier.DEVICE]:
            self._arenas[Tier.DEVICE] = backend.arena(
                slots[Tier.DEVICE], slot_bytes, ledger, account
            )
        self._flat: dict[int, torch.Tensor] = {}

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk.id in self._tier

    def has_in_place(self, chunk: Chunk) -> bool:
        """Whether the chunk's home is where compute happens."""
        return self._tier.get(chunk.id) is self._compute_tier

    def on_device(self, chunk: Chunk) -> bool:
        """Whether the chunk's home is on a DEVICE that has memory of its own."""
        return self._separate and self.has_in_place(chunk)

    def commit(self, chunk: Chunk) -> None:
        """Charges the chunk's slots, if they are not yet."""
        self._arenas[self._tier[chunk.id]].commit(self._first[chunk.id], chunk.slots)

    def commit_all(self) -> None:
        """Charges all slots that are not charged yet."""
        for arena in self._arenas.values():
            arena.commit(0, arena.slots)

    def flat(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's slots as one flat tensor; always the same tensor object."""
        flat = self._flat.get(chunk.id)
        if flat is None:
            self.commit(chunk)
            arena = self._arenas[self._tier[chunk.id]]
            flat = arena.view(self._first[chunk.id], chunk.slots, self._dtype)
            self._flat[chunk.id] = flat
        return flat

    def shard(self, chunk: Chunk) -> torch.Tensor:
        """This rank's shard of the chunk, flat."""
        flat = self.flat(chunk)
        return flat[self._shard.range(flat.numel())] if self.whole else flat

    def address(self, chunk: Chunk, piece: int) -> int:
        """Address of piece number `piece` of this rank's shard."""
        address = self._arenas[self._tier[chunk.id]].address(self._first[chunk.id])
        if self.whole:
            address += self._shard.rank * chunk.slots * self._piece_bytes
        return address + piece * self._piece_bytes

    def close(self) -> None:
        """Gives the memory back once no tensor views it."""
        self._flat.clear()
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
        self._tier.clear()
