"""Memory cut into equal slots.

A slot is handed out as a tensor made by DLPack, whose deleter lowers the slot's pin count. So a
slot is used again only when the last tensor over it is gone, whatever holds it: autograd, a
checkpoint, a traceback, user code. Transfers hold the arena's memory too, from their submission
until the kernel is done with it. No other rule says when a copy may be freed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from offload._native import Arena, Pins
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account, Tier

_NO_MEMORY = "the arena is closed or has no slots"


class HostArena:
    """`slots` slots of `slot_bytes` in one mapping. A slot is charged to the ledger when committed.

    Pages are populated on first touch, so what is not committed costs no memory. It is memory of
    the host; as that of an emulated device it is charged to another `tier`. There may be no slots,
    until resize().
    """

    def __init__(
        self,
        slots: int,
        slot_bytes: int,
        ledger: Ledger,
        account: Account,
        tier: Tier = Tier.HOST,
    ) -> None:
        self.tier = tier
        self._ledger = ledger
        self._account = account
        self._shape(slots, slot_bytes)
        self._memory: Arena | None = self._map(slots * slot_bytes) if slots else None

    def _map(self, nbytes: int) -> Arena:
        return Arena(nbytes, self.slot_bytes)

    @property
    def is_open(self) -> bool:
        """Whether it has its memory: close() was not called."""
        return self._memory is not None

    @property
    def memory(self) -> Arena:
        """All slots, one after another."""
        assert self._memory is not None, _NO_MEMORY
        return self._memory

    def commit(self, slot: int, run: int = 1) -> None:
        """Charges slots [slot, slot + run) that are not charged yet. Raises BudgetError."""
        assert slot + run <= self.slots
        fresh = run - sum(self._committed[slot : slot + run])
        if fresh:
            self._ledger.charge(self.tier, self._account, fresh * self.slot_bytes)
            self._committed[slot : slot + run] = b"\1" * run
            self.charged_slots += fresh

    def commit_all(self) -> None:
        """Charges all slots that are not charged yet. Raises BudgetError."""
        self.commit(0, self.slots)

    def runs(self, slot: int, run: int, charged: bool) -> Iterator[tuple[int, int]]:
        """The runs of slots, first and number, in [slot, slot + run) that are charged, or not."""
        at, end = slot, slot + run
        while (first := self._committed.find(charged, at, end)) >= 0:
            stop = self._committed.find(not charged, first, end)
            at = end if stop < 0 else stop
            yield first, at - first

    def decommit(self, slot: int, run: int) -> None:
        """Gives back charge and pages of slots [slot, slot + run); their content is lost."""
        charged = sum(self._committed[slot : slot + run])
        self.memory.discard(slot * self.slot_bytes, run * self.slot_bytes)
        self._ledger.release(self.tier, self._account, charged * self.slot_bytes)
        self._committed[slot : slot + run] = bytes(run)
        self.charged_slots -= charged

    def resize(self, slots: int, slot_bytes: int | None = None) -> None:
        """The arena has `slots` slots from now on, other ones, of which none is charged.

        What was in it is lost, but for tensors that view it: they keep their memory, which is not
        accounted any more. Raises BudgetError if a device has no room; then there are no slots.
        """
        self.close()
        self._shape(slots, self.slot_bytes if slot_bytes is None else slot_bytes)
        try:
            self._memory = self._map(slots * self.slot_bytes) if slots else None
        except BaseException:
            self._shape(0, self.slot_bytes)
            raise

    def _shape(self, slots: int, slot_bytes: int) -> None:
        self.slots, self.slot_bytes = slots, slot_bytes
        self.pins = Pins(slots)
        self._committed = bytearray(slots)  # 1: charged
        self.charged_slots = 0

    def address(self, slot: int) -> int:
        """Address of the first byte of `slot`."""
        assert self._memory is not None, _NO_MEMORY
        return self._memory.address + slot * self.slot_bytes

    def slot_of(self, address: int) -> int | None:
        """The slot that holds `address`, or None if it is not in this arena."""
        if self._memory is None:
            return None
        offset = address - self._memory.address
        return offset // self.slot_bytes if 0 <= offset < self.slots * self.slot_bytes else None

    def view(self, slot: int, run: int, dtype: torch.dtype, pinned: bool = False) -> torch.Tensor:
        """A flat tensor over slots [slot, slot + run); `pinned`: it is a pin of `slot`.

        It may be written to outside of torch.inference_mode(), too, wherever this is called.
        """
        assert self._memory is not None, _NO_MEMORY
        capsule = self._memory.export(
            slot * self.slot_bytes, run * self.slot_bytes, self.pins if pinned else None, slot
        )
        with torch.inference_mode(False):
            return torch.from_dlpack(capsule).view(dtype)  # type: ignore[attr-defined]

    def share(self, view: torch.Tensor) -> None:
        """The caller uses a pinned view that was made for another one, too."""

    def has_transfers(self, slot: int, run: int) -> bool:
        """Whether a transfer is under way to or from slots [slot, slot + run)."""
        transfers = None if self._memory is None else self._memory.transfers
        slots = range(slot, slot + run)
        return transfers is not None and any(map(transfers.__getitem__, slots))

    def live_views(self) -> int:
        """How many slots have a pinned view that begins there and lives."""
        return sum(self.pins[slot] > 0 for slot in range(self.slots))

    def close(self) -> None:
        """Gives the charge back. The memory goes when the last tensor over it does; idempotent."""
        self._ledger.release(self.tier, self._account, self.charged_slots * self.slot_bytes)
        self._committed, self.charged_slots = bytearray(self.slots), 0
        self._memory = None
