"""Runs of slots for arrays of any size, which are charged while somebody needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from offload.memory.arena import HostArena


class FreeSpace:
    """First-fit allocation of ranges of bytes, or of slots; neighbouring free ranges become one."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # (begin, end), ascending, never touching

    @property
    def nbytes(self) -> int:
        """Free bytes in all."""
        return sum(end - begin for begin, end in self._ranges)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The free ranges, (begin, end), ascending."""
        return tuple(self._ranges)

    def take(self, nbytes: int) -> int | None:
        """Allocates `nbytes`. Returns their offset, or None if no free range is as long."""
        for index, (begin, end) in enumerate(self._ranges):
            if end - begin >= nbytes:
                rest = (begin + nbytes, end)
                self._ranges[index : index + 1] = [rest] if rest[0] < end else []
                return begin
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Frees bytes [offset, offset + nbytes)."""
        begin, end = offset, offset + nbytes
        kept = []
        for other in self._ranges:
            assert other[1] <= offset or other[0] >= offset + nbytes, (other, offset, nbytes)
            if other[1] == begin:
                begin = other[0]
            elif other[0] == end:
                end = other[1]
            else:
                kept.append(other)
        self._ranges = sorted([*kept, (begin, end)])


@dataclass(frozen=True)
class Run:
    """Consecutive slots of an arena."""

    first: int
    slots: int


class RunPool:
    """First-fit allocation of runs in an arena whose slots are charged as they are first used.

    What was given back stays charged, for the next one, until shrink(). A run that tensors or
    transfers still use when it is given back is free when they are gone.
    """

    def __init__(self, arena: HostArena, room: Callable[[], int], in_one: bool = False) -> None:
        """
        Args:
            arena: has the slots. More than there may be at once, so that long runs are found:
                what is not charged costs addresses alone.
            room: the bytes that may be charged in all, at the time.
            in_one: the slots for which there is room are charged at the first use, and stay: RAM
                that is page-locked, which takes its time and may not be cut, and memory of a
                device.
        """
        self.arena = arena
        self._room = room
        self._in_one = in_one
        self._free = FreeSpace()  # of slots
        self._free.give(0, arena.slots)
        self._pinned: list[Run] = []  # given back, and used still
        self.used_bytes = 0  # of runs that are allocated

    def slots_for(self, nbytes: int) -> int:
        """How many slots `nbytes` take."""
        return -(-nbytes // self.arena.slot_bytes)

    @property
    def charged_bytes(self) -> int:
        """Of slots that are charged."""
        return self.arena.charged_slots * self.arena.slot_bytes

    @property
    def pinned_bytes(self) -> int:
        """Of runs that were given back, and that tensors or transfers use."""
        return sum(run.slots for run in self._pinned) * self.arena.slot_bytes

    def take(self, slots: int) -> Run | None:
        """Allocates a run; None if there is no room. Raises BudgetError if the ledger has none."""
        self._sweep()
        if self._in_one and not self.charged_bytes:
            self._charge_all()
        first = self._free.take(slots)
        if first is None:
            return None
        run, is_charged = Run(first, slots), False
        try:
            is_charged = self._charge(run)
        finally:
            if not is_charged:
                self._free.give(first, slots)
        if not is_charged:
            return None
        self.used_bytes += slots * self.arena.slot_bytes
        return run

    def _charge_all(self) -> None:
        """There are as many slots from now on as there is room for."""
        slots = min(self.arena.slots, self._room() // self.arena.slot_bytes)
        self.arena.commit(0, slots)
        self._free = FreeSpace()
        self._free.give(0, slots)

    def _charge(self, run: Run) -> bool:
        """Whether there is room for the slots of `run` that are not charged, which then are."""
        slot_bytes = self.arena.slot_bytes
        if self._in_one:
            return True
        fresh = sum(slots for _, slots in self.arena.runs(run.first, run.slots, charged=False))
        excess = self.charged_bytes + fresh * slot_bytes - self._room()
        if fresh and excess > 0:
            self._uncharge(-(-excess // slot_bytes))
            if self.charged_bytes + fresh * slot_bytes > self._room():
                return False
        self.arena.commit(run.first, run.slots)
        return True

    def give_back(self, run: Run) -> None:
        """Frees a run that take() allocated, once nothing uses it."""
        self.used_bytes -= run.slots * self.arena.slot_bytes
        if self.is_pinned(run):
            self._pinned.append(run)
        else:
            self._free.give(run.first, run.slots)

    def is_pinned(self, run: Run) -> bool:
        """Whether tensors or transfers use the run."""
        return self.arena.pins[run.first] > 0 or self.arena.has_transfers(run.first, run.slots)

    def _sweep(self) -> None:
        """Frees runs that nothing uses any more."""
        if self._pinned:
            used = []
            for run in self._pinned:
                if self.is_pinned(run):
                    used.append(run)
                else:
                    self._free.give(run.first, run.slots)
            self._pinned = used

    def shrink(self, nbytes: int = 0) -> bool:
        """Charges at most `nbytes`, as far as slots are free; whether it is so now."""
        if self._in_one:
            return self.charged_bytes <= nbytes
        self._sweep()
        excess = self.charged_bytes - nbytes
        if excess > 0:
            self._uncharge(-(-excess // self.arena.slot_bytes))
        return self.charged_bytes <= nbytes

    def _uncharge(self, slots: int) -> None:
        """Gives back charge and pages of so many slots that are free, as far as there are so many.

        From the end on: so the first ones are used again and again.
        """
        for begin, end in reversed(self._free.ranges):
            for first, length in reversed(list(self.arena.runs(begin, end - begin, charged=True))):
                if slots <= 0:
                    return
                cut = min(slots, length)
                self.arena.decommit(first + length - cut, cut)
                slots -= cut

    def address(self, run: Run) -> int:
        """Of its first byte."""
        return self.arena.address(run.first)

    def view(self, run: Run, nbytes: int, pinned: bool = True) -> torch.Tensor:
        """The first bytes of a run, flat; `pinned`: it is not free while the tensor lives."""
        return self.arena.view(run.first, run.slots, torch.uint8, pinned)[:nbytes]

    def close(self) -> None:
        """Gives the arena back; what views it keeps its memory."""
        self.arena.close()
