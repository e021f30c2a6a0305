"""Slots that hold copies of chunks whose payload is homed elsewhere."""

from __future__ import annotations

import contextlib
import enum
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from offload.arena import HostArena
from offload.backing import Backing, Operation
from offload.errors import BudgetError
from offload.order import UseOrder
from offload.sizes import format_bytes


def _nothing(chunk: int) -> None:
    pass


def _never(chunk: int) -> bool:
    return False


_POLL_S = 0.001
_NEVER = 1 << 62  # the next use of what will not be used


class SlotState(enum.Enum):
    """What a chunk's slots hold."""

    READING = "a read from home is under way into them"
    CLEAN = "the same bytes as at home"
    DIRTY = "bytes that home does not have yet"
    WRITING = "bytes on their way home; they may be read, not changed"


@dataclass
class _Entry:
    slot: int
    state: SlotState
    op: Operation | None = None
    pinned: bool = False
    unwanted: bool = False  # dropped, but Ctrl-C came while its read was waited for


class SlotCache:
    """Keeps copies of chunks in the slots of an arena; the farthest next use is given up first.

    A slot is taken from a chunk only when nothing leases it. Large chunks look for room from the
    low end, single slots from the high end, so that long runs stay possible.
    """

    def __init__(
        self,
        arena: HostArena,
        backing: Backing,
        runs: Mapping[int, int],
        order: UseOrder,
        name_of: Callable[[int], str],
        limit: int | None = None,
    ) -> None:
        """`runs` (how many consecutive slots a chunk takes) and `name_of` are by chunk id.

        Slots from `limit` on are taken only when leases leave no room below.
        """
        self._limit = self._least = arena.slots if limit is None else limit
        self._arena = arena
        self._backing = backing
        self._runs = runs
        self._order = order
        self._name_of = name_of
        # Called with the chunk: before its bytes are read, until the file has the latest; and
        # before dirty bytes leave its slots.
        self.before_read: Callable[[int], object] = _nothing
        self.before_write: Callable[[int], object] = _nothing
        self._entries: dict[int, _Entry] = {}
        self._run_at: dict[int, int] = {}  # slot -> length of the run that was last taken there
        self.wait_s = 0.0  # for transfers that were to be done by now

    def holds(self, chunk: int) -> bool:
        """Whether the chunk has slots now."""
        return chunk in self._entries

    def is_dirty(self, chunk: int) -> bool:
        """Whether the chunk is held with bytes that the file does not have."""
        entry = self._entries.get(chunk)
        return entry is not None and entry.state is SlotState.DIRTY

    def address(self, chunk: int) -> int:
        """Where the chunk's copy begins; it must be held."""
        return self._arena.address(self._entries[chunk].slot)

    def tensor(self, chunk: int, dtype: torch.dtype) -> torch.Tensor:
        """A leased flat tensor over the chunk's copy; it must be held."""
        return self._arena.view(self._entries[chunk].slot, self._runs[chunk], dtype, leased=True)

    def has_room(self, chunk: int) -> bool:
        """Whether get() finds room now."""
        return chunk in self._entries or (
            self._best_window(self._runs[chunk], chunk, demand=True) is not None
        )

    def no_room(self, chunk: int) -> BudgetError:
        """What is to be said if leases leave no room for the chunk."""
        run = self._runs[chunk]
        leased = sum(self._leased_slots())
        slot_bytes = self._arena.slot_bytes
        budget = f"{self._arena.tier.value}_memory"
        return BudgetError(
            f"no room for {self._name_of(chunk)}: it needs {run} consecutive slots of "
            f"{format_bytes(slot_bytes)}, and {leased} of {self._arena.slots} are held by tensors "
            f"still in use; raise {budget} by {format_bytes(run * slot_bytes)} or hold fewer "
            f"parameters at once (gathered(), activation checkpointing regions)"
        )

    def get(self, chunk: int) -> None:
        """Makes the chunk's bytes present, reading and making room as needed.

        Raises BudgetError if leases leave no room, NativeIoError if a transfer fails.
        """
        self._bring(chunk)
        self._settle(chunk)

    def start(self, chunk: int) -> Operation | None:
        """Starts reading the chunk, as get() does; None if its bytes are present.

        Who waits for the operation calls note_done(). Until then the bytes are not to be used.
        """
        self._bring(chunk)
        entry = self._entries[chunk]
        return entry.op if entry.state is SlotState.READING else None

    def note_done(self, chunk: int, op: Operation) -> None:
        """`op`, which start() gave, was waited for; a chunk that could not be read is not held."""
        entry = self._entries.get(chunk)
        if entry is not None and entry.op is op:
            with contextlib.suppress(Exception):  # who waited has it
                self._settle(chunk)

    def create(self, chunk: int) -> None:
        """Gives the chunk slots with undefined bytes, which the caller will fill (see dirty())."""
        entry = self._entries.get(chunk)
        if entry is not None and entry.state is not SlotState.READING:
            self._settle(chunk)
        else:
            self.drop(chunk)  # a read that is under way: its bytes are not wanted any more
            self._entries[chunk] = _Entry(self._room_for(chunk), SlotState.DIRTY)

    def dirty(self, chunk: int) -> None:
        """The caller changes the chunk's bytes: they are written before its slots are reused."""
        self._settle(chunk)
        self._entries[chunk].state = SlotState.DIRTY

    def write_back(self, chunk: int) -> None:
        """Starts writing the chunk if it is dirty."""
        entry = self._entries[chunk]
        if entry.state is SlotState.DIRTY:
            self.before_write(chunk)
            entry.op = self._backing.write(chunk, entry.slot)
            entry.state = SlotState.WRITING

    def pin(self, chunk: int) -> None:
        """Keeps the chunk's slots until unpin() or drop(), whatever else is needed."""
        self._entries[chunk].pinned = True

    def is_pinned(self, chunk: int) -> bool:
        """Whether the chunk, which must be held, is pinned."""
        return self._entries[chunk].pinned

    def unpin(self, chunk: int) -> None:
        """Undoes pin(), if the chunk is held."""
        if chunk in self._entries:
            self._entries[chunk].pinned = False

    def drop(self, chunk: int) -> None:
        """Forgets the chunk's copy; its slots are reused once nothing leases them."""
        if chunk in self._entries:
            self._forget(chunk)

    def prefetch(self, depth: int, leave_out: Callable[[int], bool] = _never) -> None:
        """Starts reading the next `depth` chunks expected, into room that is not needed sooner.

        Not those that are to be left out.
        """
        for chunk in self._order.upcoming(depth):
            if chunk not in self._entries and chunk in self._runs and not leave_out(chunk):
                run = self._runs[chunk]
                slot = self._best_window(run, chunk, demand=False)
                if slot is None:
                    return
                self._start_read(chunk, self._take(slot, run))

    def clear(self) -> None:
        """Forgets all copies; those that home does not have are written first.

        Raises what a transfer met; what was not written is held as before.
        """
        for chunk in list(self._entries):
            self.write_back(chunk)
            self._forget(chunk)

    def refit(self, limit: int | None = None) -> None:
        """The arena was resized while no copy was held; `limit` as at first."""
        assert not self._entries
        self._run_at.clear()
        self._limit = self._least = self._arena.slots if limit is None else limit

    def settle(self) -> None:
        """Waits for all transfers under way. Raises what one met."""
        for chunk, entry in list(self._entries.items()):
            if entry.unwanted:
                self._forget(chunk)
            else:
                self._settle(chunk)

    def close(self) -> None:
        """Waits for transfers under way; failures do not matter any more, nor do reads."""
        for entry in self._entries.values():
            if entry.op is not None and entry.state is SlotState.READING:
                entry.op.cancel()
        for entry in self._entries.values():
            if entry.op is not None:
                with contextlib.suppress(Exception):
                    entry.op.wait()
        self._entries.clear()

    def _bring(self, chunk: int) -> None:
        if chunk in self._entries and self._entries[chunk].unwanted:
            self._forget(chunk)
        if chunk not in self._entries:
            self._start_read(chunk, self._room_for(chunk))

    def _start_read(self, chunk: int, slot: int) -> None:
        self.before_read(chunk)
        op = self._backing.read(chunk, slot)
        self._entries[chunk] = _Entry(slot, SlotState.READING, op)

    def _settle(self, chunk: int) -> None:
        entry = self._entries[chunk]
        if entry.op is None:
            return
        began_s = time.perf_counter()
        try:
            entry.op.wait()
        except Exception:
            if entry.state is SlotState.READING:
                del self._entries[chunk]
            else:  # the bytes are still only here
                entry.state, entry.op = SlotState.DIRTY, None
            raise
        entry.state, entry.op = SlotState.CLEAN, None
        self.wait_s += time.perf_counter() - began_s

    def _forget(self, chunk: int) -> None:
        entry = self._entries[chunk]
        if entry.state is SlotState.READING:
            assert entry.op is not None
            entry.op.cancel()  # nobody wants the bytes
            entry.unwanted = True
            with contextlib.suppress(Exception):
                entry.op.wait()
        else:
            self._settle(chunk)
        del self._entries[chunk]

    def _room_for(self, chunk: int) -> int:
        """First slot of an emptied run for `chunk`. Raises BudgetError if leases leave none."""
        run = self._runs[chunk]
        slot = self._best_window(run, chunk, demand=True)
        if slot is None:
            gc.collect()  # leases may hang in reference cycles, of an exception's frames say
            while self._lost_transfers():
                time.sleep(_POLL_S)
            slot = self._best_window(run, chunk, demand=True)
        limit = self._limit
        while slot is None and self._limit < self._arena.slots:
            self._limit += 1
            slot = self._best_window(run, chunk, demand=True)
        if slot is None:
            raise self.no_room(chunk)
        try:
            return self._take(slot, run)
        except BudgetError:
            self._limit = limit  # others have the RAM by now
            raise self.no_room(chunk) from None

    def shrink(self) -> None:
        """Gives up slots past the limit, from the end on, up to one that is leased."""
        leased = self._leased_slots()
        while self._limit > self._least and not leased[self._limit - 1]:
            self._limit -= 1
            for other in self._overlapping(self._limit, 1):
                self.write_back(other)
                self._forget(other)
            self._arena.decommit(self._limit, 1)

    def _take(self, slot: int, run: int) -> int:
        for other in self._overlapping(slot, run):
            self.write_back(other)
            self._forget(other)
        self._arena.commit(slot, run)
        self._run_at[slot] = run
        return slot

    def _best_window(self, run: int, chunk: int, demand: bool) -> int | None:
        """First slot of the window that costs least to empty: its soonest next use is farthest."""
        leased = self._leased_slots()
        best: tuple[int, int] | None = None
        found: int | None = None
        firsts = range(self._limit - run + 1)
        for first in reversed(firsts) if run == 1 else firsts:
            if any(leased[first : first + run]):
                continue
            owners = self._overlapping(first, run)
            entries = [self._entries[owner] for owner in owners]
            if any(entry.pinned for entry in entries):
                continue
            soonest = min(map(self._order.next_use, owners), default=_NEVER)
            if not demand and (
                any(entry.state is not SlotState.CLEAN for entry in entries)
                or soonest <= self._order.next_use(chunk)
            ):
                continue
            if best is None or (soonest, -len(owners)) > best:
                best, found = (soonest, -len(owners)), first
        return found

    def _leased_slots(self) -> list[bool]:
        leased = [False] * self._arena.slots
        for slot, run in self._run_at.items():
            if self._arena.leases[slot]:
                leased[slot : slot + run] = [True] * run
        for slot in self._lost_transfers():
            leased[slot] = True
        return leased

    def _lost_transfers(self) -> list[int]:
        """Slots under a transfer that no entry has, because Ctrl-C came after it had begun."""
        slots = self._arena.transferred_slots()
        known = {
            slot
            for other, entry in (self._entries.items() if slots else ())
            if entry.op is not None
            for slot in range(entry.slot, entry.slot + self._runs[other])
        }
        return [slot for slot in slots if slot not in known]

    def _overlapping(self, slot: int, run: int) -> list[int]:
        return [
            other
            for other, entry in self._entries.items()
            if entry.slot < slot + run and slot < entry.slot + self._runs[other]
        ]
