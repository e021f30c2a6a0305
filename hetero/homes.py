"""HOST homes of one payload: every chunk that lives in RAM has its slots from the start."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero.layout import Chunk, Layout
from offload.arena import HostArena
from offload.ledger import Ledger
from offload.tiers import Account, Tier


class HostHomes:
    """Slots for the chunks that `tiers` puts on HOST, charged to `account` when first used."""

    def __init__(
        self,
        layout: Layout,
        tiers: Sequence[Tier | None],
        slot_bytes: int,
        dtype: torch.dtype,
        ledger: Ledger,
        account: Account,
    ) -> None:
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

    def flat(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's slots as one flat tensor; always the same tensor object."""
        flat = self._flat.get(chunk.id)
        if flat is None:
            assert self._arena is not None
            self.commit(chunk)
            flat = self._arena.view(self._first[chunk.id], chunk.slots, self._dtype)
            self._flat[chunk.id] = flat
        return flat

    def address(self, chunk: Chunk, piece: int) -> int:
        """Address of the chunk's slot number `piece`."""
        assert self._arena is not None
        return self._arena.address(self._first[chunk.id] + piece)

    def close(self) -> None:
        """Gives the memory back once no tensor views it."""
        self._flat.clear()
        if self._arena is not None:
            self._arena.close()
            self._arena = None
            self._first.clear()
