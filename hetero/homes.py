"""HOST homes of one payload: every chunk that lives in RAM has its room from the start."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero.layout import Chunk, Layout
from offload.arena import HostArena
from offload.ledger import Ledger
from offload.tiers import Account, Tier


class HostHomes:
    """Slots for the chunks that `tiers` puts on HOST, charged to `account` when first used.

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
        whole: bool = False,
    ) -> None:
        self.whole = whole or layout.shard.ranks == 1
        self._shard = layout.shard
        self._piece_bytes = slot_bytes if not self.whole else slot_bytes // layout.shard.ranks
        self._first: dict[int, int] = {}
        slots = 0
        for chunk in layout.chunks:
            if tiers[chunk.id] is Tier.HOST:
                self._first[chunk.id] = slots
                slots += chunk.slots
        self._dtype = dtype
        self._arena = HostArena(slots, slot_bytes, ledger, account) if slots else None
        self._flat: dict[int, torch.Tensor] = {}

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk.id in self._first

    def commit(self, chunk: Chunk) -> None:
        """Charges the chunk's slots, if they are not yet."""
        assert self._arena is not None
        self._arena.commit(self._first[chunk.id], chunk.slots)

    def commit_all(self) -> None:
        """Charges all slots that are not charged yet."""
        if self._arena is not None:
            self._arena.commit(0, self._arena.slots)

    def flat(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's slots as one flat tensor; always the same tensor object."""
        flat = self._flat.get(chunk.id)
        if flat is None:
            assert self._arena is not None
            self.commit(chunk)
            flat = self._arena.view(self._first[chunk.id], chunk.slots, self._dtype)
            self._flat[chunk.id] = flat
        return flat

    def shard(self, chunk: Chunk) -> torch.Tensor:
        """This rank's shard of the chunk, flat."""
        flat = self.flat(chunk)
        return flat[self._shard.range(flat.numel())] if self.whole else flat

    def address(self, chunk: Chunk, piece: int) -> int:
        """Address of piece number `piece` of this rank's shard."""
        assert self._arena is not None
        address = self._arena.address(self._first[chunk.id])
        if self.whole:
            address += self._shard.rank * chunk.slots * self._piece_bytes
        return address + piece * self._piece_bytes

    def close(self) -> None:
        """Gives the memory back once no tensor views it."""
        self._flat.clear()
        if self._arena is not None:
            self._arena.close()
            self._arena = None
            self._first.clear()
