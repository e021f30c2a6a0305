"""Copies of chunks in the slots of an arena: how they come there, and which make room for others.

With two slots or more one gather of a step is waited for, its first, because the next chunks are
read into slots that are not needed sooner. A chain of n chunks is gathered 2n - slots times a step,
forward and back. A step that uses chunks otherwise than the last one is right, and only predicted
less well.

Several sequences of uses are known side by side (training, evaluation, another length), each by
itself; the one that the step at hand has followed best so far tells what comes next.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import heapq
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Protocol

import torch

from offload._native import IoEngine, IoOp
from offload.disk.scratch_file import Extent, ScratchFile
from offload.errors import BudgetError
from offload.memory.arena import HostArena
from offload.memory.operation import Operation, wait_quietly
from offload.memory.sizes import format_bytes

NEVER = 1 << 62  # the next use of a slot that holds nothing
UNKNOWN = 1 << 61  # the next use of a chunk that the expected step does not use

_MOST_USES = 1 << 14  # of one step; more are taken for several, as of inference that has no steps
_ENOUGH_TIMES = 4
_MOST_SEQUENCES = 4  # known at once; following one costs about a microsecond a use
_MOST_PASSED = 256  # uses that one use may skip before all next uses are looked up again


class _Sequence:
    """The uses of one step, and how far the step at hand has followed them."""

    def __init__(self, uses: Sequence[int], times_seen: int = 1) -> None:
        self.uses = tuple(uses)
        self.times_seen = times_seen
        self.followed = 0  # uses that came as expected, less those that did not
        self.passed = 0  # uses that lie behind the step at hand, made or skipped, in all rounds
        self._position = 0  # the next use expected
        self._at: dict[int, list[int]] = {}  # chunk -> positions, ascending
        for position, chunk in enumerate(self.uses):
            self._at.setdefault(chunk, []).append(position)

    def rewind(self) -> None:
        self._position = self.followed = 0

    def note(self, chunk: int) -> range:
        """Follows a use. Returns the positions that are passed by it, modulo the uses."""
        distance = self.distance(chunk)
        self.followed += 1 if distance == 0 else -1
        if distance is None:
            return range(0)
        passed = range(self._position, self._position + distance + 1)
        self._position = passed.stop % len(self.uses)
        self.passed += len(passed)
        return passed

    def distance(self, chunk: int) -> int | None:
        positions = self._at.get(chunk)
        if not positions:
            return None
        index = bisect_left(positions, self._position)
        if index < len(positions):
            return positions[index] - self._position
        return positions[0] + len(self.uses) - self._position

    def upcoming(self, count: int) -> list[int]:
        found: dict[int, None] = {}
        step = 0
        while len(found) < min(count, len(self._at)):
            found[self.uses[(self._position + step) % len(self.uses)]] = None
            step += 1
        return list(found)


class UseOrder:
    """Remembers sequences of uses, one per step, and follows them through the next.

    A step that deviates costs a worse guess, never an error.
    """

    def __init__(self) -> None:
        self._known: list[_Sequence] = []  # the last seen first
        self._best: _Sequence | None = None
        self._recording: list[int] = []
        self._generation = 0  # of next uses: in another one all of them may be different
        self._moved: list[int] = []  # chunks whose next use has changed within the generation
        self._in_place: frozenset[int] = frozenset()  # chunks that are not gathered

    def note(self, chunk: int) -> None:
        """`chunk` is used now. Repeated uses in a row count once."""
        if self._recording and self._recording[-1] == chunk:
            return
        if len(self._recording) == _MOST_USES:
            self.end_step()
        self._recording.append(chunk)
        for sequence in self._known:
            passed = sequence.note(chunk)
            if sequence is self._best:
                self._note_moved(sequence, passed)
        if len(self._known) > 1:
            best = self._best
            self._choose()
            if self._best is not best:
                self._begin_generation()

    def _note_moved(self, sequence: _Sequence, passed: range) -> None:
        if len(passed) > _MOST_PASSED or len(self._moved) > _MOST_USES:
            self._begin_generation()
        else:
            uses = sequence.uses
            self._moved += [uses[position % len(uses)] for position in passed]

    def _begin_generation(self) -> None:
        self._generation += 1
        self._moved = []

    def end_step(self) -> None:
        """A step is over: the next one is expected to do the same, or what an earlier one did.

        Idempotent; a step without any use is none.
        """
        if not self._recording:
            return
        uses, self._recording = tuple(self._recording), []
        self._learn(uses)
        for sequence in self._known:
            sequence.rewind()
        self._choose()
        self._begin_generation()

    def use_in_place(self, chunks: Collection[int]) -> None:
        """These, and no others, are never gathered from now on: nothing expects them any more."""
        self._in_place = frozenset(chunks)
        known, self._known = self._known, []
        for sequence in reversed(known):
            self._learn(sequence.uses, sequence.times_seen)
        self._choose()
        self._begin_generation()

    def _learn(self, uses: tuple[int, ...], times_seen: int = 1) -> None:
        if self._in_place:
            rest = [chunk for chunk in uses if chunk not in self._in_place]
            uses = tuple(chunk for chunk, _ in groupby(rest))  # repeated uses count once
            if not uses:
                return
        seen = next((s for s in self._known if s.uses == uses), None)
        if seen is None:
            self._known.insert(0, _Sequence(uses, times_seen))
            del self._known[_MOST_SEQUENCES:]
        else:
            # Counted to a few: what was done a thousand times may be over for good.
            seen.times_seen = min(seen.times_seen + times_seen, _ENOUGH_TIMES)
            self._known.remove(seen)
            self._known.insert(0, seen)

    def _choose(self) -> None:
        """The one followed best; of equals the one seen most often, then the last seen."""
        self._best = max(self._known, key=lambda s: (s.followed, s.times_seen), default=None)

    def next_use_number(self, chunk: int) -> int:
        """The number of the chunk's next use, counted from the beginning of the generation.

        It stays the same until the use is made or skipped (see moved()). UNKNOWN if none is
        expected; larger than the number of every use that is.
        """
        if self._best is None:
            return UNKNOWN
        distance = self._best.distance(chunk)
        return UNKNOWN if distance is None else self._best.passed + distance

    def moved(self) -> tuple[int, Sequence[int]]:
        """What has changed in next_use_number(), for who keeps its results.

        The number of the generation, and the chunks whose next use has changed since it began, in
        the order of these changes; a chunk may be there several times. The list only grows until
        another generation begins, in which all next uses may be different.
        """
        return self._generation, self._moved

    def upcoming(self, count: int) -> list[int]:
        """The next `count` different chunks expected, nearest first."""
        return [] if self._best is None else self._best.upcoming(count)


_Ranked = tuple[int, int, int]  # minus the next use, when the chunk was added, the chunk
# The first slot, the next use (-1: they must not be taken), and when the chunk was added (0: no
# chunk has them).
_Segment = tuple[int, int, int]


class SlotTable:
    """The chunks in the slots of an arena, by slot and by next use."""

    def __init__(self, arena: HostArena, runs: Mapping[int, int], order: UseOrder) -> None:
        """`runs` says how many consecutive slots each chunk takes."""
        self._arena = arena
        self._runs = runs
        self._order = order
        self._seen = (-1, 0)  # generation of the next uses in the heap, and changes heeded of it
        self.clear()

    def clear(self) -> None:
        """Forgets all chunks, and what was pinned: the arena may have other slots."""
        slots = self._arena.slots
        self._slot_of: dict[int, int] = {}
        self._added: dict[int, int] = {}  # in which order the chunks came
        self._adds = 0
        self._owner: list[int | None] = [None] * slots
        self._free = (1 << slots) - 1  # a bit for each slot without an owner
        # The run that was taken last and has the slot: it may be pinned without an owner.
        self._first_of = list(range(slots))
        self._run_at = [1] * slots  # by its first slot
        self._heap: list[_Ranked] = []
        self._ranked: dict[int, _Ranked] = {}  # the valid one of each chunk's in the heap

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._slot_of

    def slot_of(self, chunk: int) -> int:
        """The first slot of a chunk that is in the table."""
        return self._slot_of[chunk]

    def add(self, chunk: int, slot: int) -> None:
        """The chunk has the slots from `slot` on, which have no owner and are not pinned."""
        run = self._runs[chunk]
        mask = ((1 << run) - 1) << slot
        assert self._free & mask == mask, (chunk, slot)
        self._free ^= mask
        self._owner[slot : slot + run] = [chunk] * run
        self._first_of[slot : slot + run] = [slot] * run
        self._run_at[slot] = run
        self._slot_of[chunk] = slot
        self._added[chunk] = self._adds = self._adds + 1
        self._rank(chunk)

    def remove(self, chunk: int) -> None:
        """The chunk's slots have no owner any more; tensors may still pin them."""
        slot, run = self._slot_of.pop(chunk), self._runs[chunk]
        self._owner[slot : slot + run] = [None] * run
        self._free |= ((1 << run) - 1) << slot
        del self._ranked[chunk], self._added[chunk]

    def owners(self, slot: int, run: int) -> list[int]:
        """The chunks that have some of the slots [slot, slot + run)."""
        found = dict.fromkeys(self._owner[slot : slot + run])
        return [chunk for chunk in found if chunk is not None]

    def is_pinned(self, slot: int) -> bool:
        """Whether a tensor views the slot, or another one of the run it was last taken in."""
        first = self._first_of[slot]
        return slot < first + self._run_at[first] and self._arena.pins[first] > 0

    def pinned_slots(self) -> int:
        """How many slots are pinned."""
        return sum(map(self.is_pinned, range(self._arena.slots)))

    def best_slots(
        self,
        run: int,
        limit: int,
        may_evict: Callable[[int], bool],
        later_than: int = -1,
    ) -> int | None:
        """The first of `run` consecutive slots that cost least to take; None if none may be taken.

        Slots without an owner come first: a single one at the high end and a run at the low end, so
        that long runs stay possible. Then those whose soonest next use is farthest; of equals, as
        where nothing is known of next uses, those of few chunks, which came longest ago. (What came
        last may be on its way to the file still, and would have to be waited for.)

        Args:
            limit: Slots from here on are not considered.
            may_evict: Whether a chunk may lose its slots, if they are not pinned.
            later_than: Only chunks whose next use has a greater number lose theirs.
        """
        if run == 1:
            return self._best_slot(limit, may_evict, later_than)
        return self._best_run(run, limit, may_evict, later_than)

    def _best_slot(
        self, limit: int, may_evict: Callable[[int], bool], later_than: int
    ) -> int | None:
        free = self._free & ((1 << limit) - 1)
        while free:
            slot = free.bit_length() - 1
            if not self.is_pinned(slot):
                return slot
            free ^= 1 << slot
        self._heed_order()
        passed_over: list[_Ranked] = []
        found: int | None = None
        while self._heap and -self._heap[0][0] > later_than:
            ranked = heapq.heappop(self._heap)
            chunk = ranked[2]
            if self._ranked.get(chunk) is not ranked:
                continue
            passed_over.append(ranked)
            if may_evict(chunk) and self._arena.pins[self._slot_of[chunk]] == 0:
                found = self._slot_of[chunk] + self._runs[chunk] - 1
                break
        for ranked in passed_over:
            heapq.heappush(self._heap, ranked)
        return found

    def _best_run(
        self, run: int, limit: int, may_evict: Callable[[int], bool], later_than: int
    ) -> int | None:
        segments = self._segments(limit, may_evict, later_than)
        best, found = (-1, 0, 0), None
        # A run that begins within a segment costs no less than the one from its beginning on.
        for number, (first, _, _) in enumerate(segments):
            if first + run > limit:
                break
            soonest, newest, owners = NEVER, 0, 0
            for begin, next_use, added in segments[number : number + run]:
                if begin >= first + run:
                    break
                soonest, newest = min(soonest, next_use), max(newest, added)
                owners += added > 0
            if soonest >= max(best[0], 0) and (soonest, -owners, -newest) > best:
                best, found = (soonest, -owners, -newest), first
        return found

    def _segments(
        self, limit: int, may_evict: Callable[[int], bool], later_than: int
    ) -> list[_Segment]:
        """All slots below `limit`: those of each chunk, and those between that have no owner."""
        segments: list[_Segment] = []
        slot = 0
        while slot < limit:
            chunk = self._owner[slot]
            if chunk is not None:
                next_use = self._order.next_use_number(chunk)
                usable = next_use > later_than and may_evict(chunk) and self._arena.pins[slot] == 0
                segments.append((slot, next_use if usable else -1, self._added[chunk]))
                slot += self._runs[chunk]
            else:
                next_use = -1 if self.is_pinned(slot) else NEVER
                if not (segments and segments[-1][1:] == (next_use, 0)):
                    segments.append((slot, next_use, 0))
                slot += 1
        return segments

    # The heap

    def _rank(self, chunk: int) -> None:
        ranked = (-self._order.next_use_number(chunk), self._added[chunk], chunk)
        self._ranked[chunk] = ranked
        heapq.heappush(self._heap, ranked)
        if len(self._heap) > 2 * len(self._ranked) + 64:  # most of it is not valid any more
            self._heap = list(self._ranked.values())
            heapq.heapify(self._heap)

    def _heed_order(self) -> None:
        """Brings the heap up to date with the order of uses."""
        generation, moved = self._order.moved()
        if generation != self._seen[0]:
            self._heap.clear()
            for chunk in self._slot_of:
                self._rank(chunk)
        else:
            for chunk in moved[self._seen[1] :]:
                if chunk in self._slot_of:
                    self._rank(chunk)
        self._seen = generation, len(moved)


class Backing(Protocol):
    """Moves a chunk between its home and slots of an arena."""

    def read(self, chunk: int, slot: int) -> Operation:
        """Starts filling the slots from `slot` on."""


class WritableBacking(Backing, Protocol):
    """A Backing of chunks that may change in their slots."""

    def write(self, chunk: int, slot: int) -> Operation:
        """Starts taking the slots' bytes home."""


class FileTransfers(Protocol):
    """Asynchronous transfers of one file; addresses, sizes and offsets are whole pages."""

    def read(self, address: int, nbytes: int, offset: int) -> Operation:
        """Starts reading to `address`. Raises NativeIoError if it cannot be started."""

    def write(self, address: int, nbytes: int, offset: int) -> Operation:
        """Starts writing from `address`. Raises NativeIoError if it cannot be started."""


class Transfers:
    """Asynchronous transfers of one scratch file."""

    def __init__(self, engine: IoEngine, scratch: ScratchFile, checksums: bool = False) -> None:
        """`checksums`: what is read is compared with the checksums of what was written."""
        self.engine = engine
        # First, because deciding may let members go.
        stripes = scratch.stripes
        members = [(m.fd, m.path) for m in scratch.members]
        self.file = engine.add_striped_file(members, stripes, checksums)

    def read(self, address: int, nbytes: int, offset: int, soon: bool = False) -> IoOp:
        """Starts reading file bytes [offset, offset + nbytes) to `address`.

        `soon`: nobody waits for it yet, so it comes after what somebody waits for (IoOp.hurry()).
        """
        return self.engine.read(self.file, address, nbytes, offset, soon)

    def write(self, address: int, nbytes: int, offset: int, soon: bool = False) -> IoOp:
        """Starts writing `nbytes` at `address` to the file at `offset`; `soon` as for read()."""
        return self.engine.write(self.file, address, nbytes, offset, soon)

    def close(self) -> None:
        """Waits for the transfers under way; idempotent."""
        if self.file >= 0:
            self.engine.remove_file(self.file)
            self.file = -1


class FileBacking:
    """Chunks whose home is in the file."""

    def __init__(
        self,
        arena: HostArena,
        transfers: FileTransfers,
        extents: Mapping[int, Extent],
        before_read: Callable[[int], object] | None = None,
        before_write: Callable[[int], object] | None = None,
    ) -> None:
        """
        Args:
            arena: Has the slots.
            transfers: Those of the file.
            extents: Where the chunks are in the file, by chunk.
            before_read: Called with a chunk before it is read: waits until the file has what it is
                to have. What it raises, read() raises.
            before_write: Likewise, before the bytes of its slots are written.
        """
        self._arena = arena
        self._transfers = transfers
        self._extents = extents
        self._before_read = before_read
        self._before_write = before_write

    def read(self, chunk: int, slot: int) -> Operation:
        """Starts a read. Raises NativeIoError if it cannot be started."""
        if self._before_read is not None:
            self._before_read(chunk)
        extent = self._extents[chunk]
        return self._transfers.read(self._arena.address(slot), extent.nbytes, extent.offset)

    def write(self, chunk: int, slot: int) -> Operation:
        """Starts a write. Raises NativeIoError if it cannot be started."""
        if self._before_write is not None:
            self._before_write(chunk)
        extent = self._extents[chunk]
        return self._transfers.write(self._arena.address(slot), extent.nbytes, extent.offset)


class SlotState(enum.Enum):
    """What a chunk's slots hold."""

    READING = "a read from home is under way into them"
    CLEAN = "the same bytes as at home"
    DIRTY = "bytes that home does not have yet"
    WRITING = "bytes on their way home; they may be read, not changed"


@dataclass
class _Entry:
    state: SlotState
    op: Operation | None = None  # the transfer that the state speaks of
    locked: bool = False

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keeps its slots while its transfer is waited for.

        In such a wait a rank may start reads that other ranks wait for. If one of them took these
        slots, it would cancel this transfer, and wait for it inside the wait for it, for ever.
        """
        was_locked, self.locked = self.locked, True
        try:
            yield
        finally:
            self.locked = was_locked

    def cancel_read(self) -> None:
        """Ends a read whose bytes nobody wants."""
        assert self.op is not None
        self.op.cancel()
        with self.kept():
            wait_quietly(self.op)


class SlotCache:
    """Keeps copies of chunks in the slots of an arena; the farthest next use is given up first.

    A slot is taken from a chunk only when nothing pins it (see SlotTable). An entry is made before
    its transfer is started, so that no exception leaves a transfer into slots without an owner.
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

        Slots from `limit` on are taken only when pins leave no room below.
        """
        # How many there are without those that are used only while RAM is free.
        self.slots = arena.slots if limit is None else limit
        self._limit = self.slots
        self._arena = arena
        self._table = SlotTable(arena, runs, order)
        self._backing = backing
        self._runs = runs
        self._order = order
        self._name_of = name_of
        self._entries: dict[int, _Entry] = {}
        self.wait_s = 0.0  # for transfers that were to be done by now
        self.is_making_room = False

    def holds(self, chunk: int) -> bool:
        """Whether the chunk has slots now."""
        return chunk in self._entries

    def address(self, chunk: int) -> int:
        """Where the chunk's copy begins; it must be held."""
        return self._arena.address(self._table.slot_of(chunk))

    def tensor(self, chunk: int, dtype: torch.dtype, pinned: bool = True) -> torch.Tensor:
        """A flat tensor over the chunk's copy, which must be held; `pinned`: it is a pin."""
        return self._arena.view(self._table.slot_of(chunk), self._runs[chunk], dtype, pinned)

    def has_room(self, chunk: int) -> bool:
        """Whether get() finds room now."""
        return chunk in self._entries or self._slots_for(chunk) is not None

    def no_room(self, chunk: int) -> BudgetError:
        """The error that says that pins leave no room for the chunk, with numbers."""
        run = self._runs[chunk]
        pinned = self._table.pinned_slots()
        slot_bytes = self._arena.slot_bytes
        budget = f"{self._arena.tier.value}_memory"
        everything = max(run, sum(self._runs.values()) - self._arena.slots)
        return BudgetError(
            f"no room for {self._name_of(chunk)}: it needs {run} consecutive slots of "
            f"{format_bytes(slot_bytes)}, and {pinned} of {self._arena.slots} are held by tensors "
            f"still in use; raise {budget} by at least {format_bytes(run * slot_bytes)} (for all "
            f"chunks at once by {format_bytes(everything * slot_bytes)}), or hold fewer parameters "
            f"at once (gathered(), activation checkpointing regions; the graph of a backward with "
            f"create_graph=True holds all that it has used)"
        )

    def get(self, chunk: int) -> None:
        """Makes the chunk's bytes present, reading and making room as needed.

        Raises BudgetError if pins leave no room, NativeIoError if a transfer fails.
        """
        if chunk not in self._entries:
            self.begin(chunk, must=True)
        self._finish_transfer(chunk)

    def start(self, chunk: int) -> Operation | None:
        """Starts reading the chunk, as get() does; None if its bytes are present.

        The caller waits for the operation and then calls note_done(); before that the bytes must
        not be used.
        """
        if chunk not in self._entries:
            self.begin(chunk, must=True)
        entry = self._entries[chunk]
        return entry.op if entry.state is SlotState.READING else None

    def note_done(self, chunk: int, op: Operation) -> None:
        """`op`, which start() gave, was waited for; a chunk that could not be read is not held."""
        entry = self._entries.get(chunk)
        if entry is not None and entry.op is op:
            with contextlib.suppress(Exception):  # the caller that waited has it
                self._finish_transfer(chunk)

    def drop(self, chunk: int) -> None:
        """Forgets the chunk's copy, if it is held; its slots are reused once nothing pins them."""
        entry = self._entries.get(chunk)
        if entry is None:
            return
        if entry.state is not SlotState.READING:
            self._finish_transfer(chunk)
        else:
            entry.cancel_read()
        self._release(chunk)

    def prefetch(self, depth: int, leave_out: Callable[[int], bool] = lambda _: False) -> None:
        """Starts reading the next `depth` chunks expected, into room that is not needed sooner.

        Chunks for which `leave_out` returns True are not read.
        """
        for chunk in self._order.upcoming(depth):
            is_wanted = chunk not in self._entries and chunk in self._runs
            if is_wanted and not leave_out(chunk) and not self.begin(chunk, must=False):
                return

    def begin(
        self,
        chunk: int,
        must: bool,
        read: Callable[[int, Callable[[], Operation]], Operation] | None = None,
    ) -> bool:
        """Starts reading a chunk that is not held, as get() does, or else as prefetch() does.

        `read` does so in the place of the backing, of which it gets what starts a read.

        Returns False if that is not a `must` and there is no room that is not needed sooner. Raises
        BudgetError if it is one and pins leave no room.
        """
        slot = self._room_for(chunk) if must else self._room_until_use(chunk)
        if slot is None:
            return False
        entry = self._hold(chunk, slot, SlotState.READING)
        try:
            by_backing = partial(self._backing.read, chunk, slot)
            entry.op = by_backing() if read is None else read(chunk, by_backing)
        except Exception:
            self._release(chunk)
            raise
        return True

    def clear(self) -> None:
        """Forgets all copies; those that home does not have are written first.

        Raises what a transfer met; what was not written is held as before.
        """
        self._give_up(list(self._entries))

    def refit(self, limit: int | None = None) -> None:
        """The arena was resized while no copy was held; `limit` as at first."""
        assert not self._entries
        self._table.clear()
        self._limit = self.slots = self._arena.slots if limit is None else limit

    def finish_transfers(self) -> None:
        """Waits for all transfers under way. Raises what one met."""
        for chunk in list(self._entries):
            if chunk in self._entries:  # another one's read may have taken its slots meanwhile
                self._finish_transfer(chunk)

    def close(self) -> None:
        """Cancels reads, waits for all transfers under way and ignores their failures."""
        for entry in self._entries.values():
            if entry.op is not None and entry.state is SlotState.READING:
                entry.op.cancel()
        for entry in self._entries.values():
            wait_quietly(entry.op)
        self._entries.clear()
        self._table.clear()

    def _hold(self, chunk: int, slot: int, state: SlotState) -> _Entry:
        assert not self._arena.has_transfers(slot, self._runs[chunk]), (chunk, slot)
        self._table.add(chunk, slot)
        self._entries[chunk] = _Entry(state)
        return self._entries[chunk]

    def _release(self, chunk: int) -> None:
        del self._entries[chunk]
        self._table.remove(chunk)

    def _finish_transfer(self, chunk: int) -> None:
        entry = self._entries[chunk]
        if entry.op is None:
            return
        began_s = time.perf_counter()
        try:
            with entry.kept():
                entry.op.wait()
        except Exception:
            if entry.state is SlotState.READING:
                self._release(chunk)
            else:  # the bytes are still only here
                entry.state, entry.op = SlotState.DIRTY, None
            raise
        entry.state, entry.op = SlotState.CLEAN, None
        self.wait_s += time.perf_counter() - began_s

    def _room_for(self, chunk: int) -> int:
        """First slot of an emptied run for `chunk`. Raises BudgetError if pins leave none."""

        def is_taken(slot: int) -> bool:
            """Whether a tensor pins the slot, or its chunk is locked."""
            owners = self._table.owners(slot, 1)
            return self._table.is_pinned(slot) or any(self._entries[o].locked for o in owners)

        run = self._runs[chunk]
        slot = self._slots_for(chunk)
        if slot is None:
            gc.collect()  # pins may hang in reference cycles, of an exception's frames say
            slot = self._slots_for(chunk)
        limit = self._limit
        while slot is None and self._limit < self._arena.slots:
            self._limit += 1
            last = range(max(0, self._limit - run), self._limit)  # no others can have become free
            if len(last) == run and not any(map(is_taken, last)):
                slot = last.start
        try:
            if slot is not None:
                return self._take(slot, run)
        except BudgetError:
            pass  # others have the RAM by now
        self._limit = limit
        raise self.no_room(chunk)

    def shrink(self) -> None:
        """Gives up slots past the limit, from the end on, up to one that is pinned."""
        while self._limit > self.slots and not self._table.is_pinned(self._limit - 1):
            self._limit -= 1
            self._give_up(self._table.owners(self._limit, 1))
            self._arena.decommit(self._limit, 1)

    def _take(self, slot: int, run: int) -> int:
        self.is_making_room = True
        try:
            self._give_up(self._table.owners(slot, run))
            self._arena.commit(slot, run)
        finally:
            self.is_making_room = False
        return slot

    def _give_up(self, chunks: Sequence[int]) -> None:
        was_making_room, self.is_making_room = self.is_making_room, True
        try:
            for chunk in chunks:
                self.drop(chunk)
        finally:
            self.is_making_room = was_making_room

    def _slots_for(self, chunk: int) -> int | None:
        """The slots that the chunk should take now, whatever they hold."""
        return self._table.best_slots(
            self._runs[chunk], self._limit, lambda other: not self._entries[other].locked
        )

    def _room_until_use(self, chunk: int) -> int | None:
        """First slot of an emptied run that the chunk may have before it is used, because nothing
        in it is used sooner."""

        def may_evict(other: int) -> bool:
            entry = self._entries[other]
            return entry.state is SlotState.CLEAN and not entry.locked

        run, next_use = self._runs[chunk], self._order.next_use_number(chunk)
        slot = self._table.best_slots(run, self._limit, may_evict, next_use)
        return None if slot is None else self._take(slot, run)


class WriteBackCache(SlotCache):
    """A SlotCache of chunks that change in their slots, and are written home from there."""

    _backing: WritableBacking

    def create(self, chunk: int) -> None:
        """Allocates slots for the chunk; the caller fills them and calls dirty()."""
        entry = self._entries.get(chunk)
        if entry is None:
            self._hold(chunk, self._room_for(chunk), SlotState.DIRTY)
        elif entry.state is SlotState.READING:
            entry.cancel_read()
            entry.state, entry.op = SlotState.DIRTY, None  # (locked as before)
        else:
            self._finish_transfer(chunk)

    def dirty(self, chunk: int) -> None:
        """Notes that the caller changes the bytes: they are written before the slots are reused."""
        self._finish_transfer(chunk)
        self._entries[chunk].state = SlotState.DIRTY

    def write_back(self, chunk: int) -> None:
        """Starts writing the chunk if it is dirty."""
        entry = self._entries[chunk]
        if entry.state is SlotState.DIRTY:
            entry.op = self._backing.write(chunk, self._table.slot_of(chunk))
            entry.state = SlotState.WRITING

    def lock(self, chunk: int) -> None:
        """Keeps the chunk's slots until unlock() or drop(), whatever else is needed."""
        self._entries[chunk].locked = True

    def is_locked(self, chunk: int) -> bool:
        """Whether the chunk is held, and locked."""
        return chunk in self._entries and self._entries[chunk].locked

    def unlock(self, chunk: int) -> None:
        """Undoes lock(), if the chunk is held."""
        if chunk in self._entries:
            self._entries[chunk].locked = False

    def _give_up(self, chunks: Sequence[int]) -> None:
        for chunk in chunks:
            self.write_back(chunk)
            super()._give_up([chunk])


class HostCopy:
    """A chunk's bytes in RAM, or on their way there; its slots are pinned until release().

    SharedCache.start() makes it.
    """

    def __init__(self, cache: SharedCache, chunk: int, op: Operation | None) -> None:
        """`op` brings the bytes; None if they are there."""
        self._cache = cache
        self._chunk = chunk
        self.op = op
        self._pin: torch.Tensor | None
        self.flat, self._pin = cache.views(chunk)

    def wait(self) -> None:
        """Until the bytes are there. Raises what bringing them raises."""
        if self.op is not None:
            try:
                self.op.wait()
            finally:
                self._cache.note_done(self._chunk, self.op)

    def cancel(self) -> None:
        """The bytes are not needed: wait() may end early, with an error."""
        if self.op is not None:
            self.op.cancel()

    def release(self) -> None:
        """Ends the pin; `flat` must not be used any more. Idempotent."""
        if self._pin is not None:
            self._pin = None
            self._cache.note_released(self)


class SharedCache:
    """A SlotCache that several threads use, each for as long as it says.

    The views that it gives are no pins; the pin ends at a known time, so that a thread that waits
    for room can be told.
    """

    def __init__(self, cache: SlotCache, dtype: torch.dtype, patience_s: float = 0.0) -> None:
        """`patience_s`: how long open() and fill() wait for room that other threads take.

        For room that copies from start() take they wait anyway: those end by themselves.
        """
        self._cache = cache
        self._dtype = dtype
        self._patience_s = patience_s
        # Reentrant. Guards the state of slots, not the bytes in them; told when a pin ends.
        self._changed = threading.Condition()
        self._started: set[HostCopy] = set()  # what start() gave and is not released

    def start(self, chunk: int) -> HostCopy | None:
        """Starts bringing the chunk to RAM; the caller releases the copy.

        None if pins leave no room now. Raises an OSError if it cannot be started.
        """
        with self._changed:
            if not self._cache.has_room(chunk):
                return None
            copy = HostCopy(self, chunk, self._cache.start(chunk))
            self._started.add(copy)
            return copy

    def open(self, chunk: int) -> AbstractContextManager[torch.Tensor]:
        """The chunk's bytes, flat, inside the block.

        Raises BudgetError if there is no room and none comes in time, and an OSError if they cannot
        be read.
        """
        return self._pinned(chunk, self._cache.get)

    @contextmanager
    def _pinned(self, chunk: int, bring: Callable[[int], None]) -> Iterator[torch.Tensor]:
        give_up_s = time.monotonic() + self._patience_s
        with self._changed:
            while not self._cache.has_room(chunk):
                left_s = give_up_s - time.monotonic()
                if not self._started and left_s <= 0:
                    break  # bring() raises what is to be said
                self._changed.wait(None if self._started else left_s)
            bring(chunk)
            flat, pin = self.views(chunk)
        try:
            yield flat
        finally:
            with self._changed:
                del pin
                self._changed.notify_all()

    def drop(self, chunk: int) -> None:
        """Forgets the copy."""
        with self._changed:
            self._cache.drop(chunk)

    def no_room(self, chunk: int) -> Exception:
        """The error that says that pins leave no room for the chunk, with numbers."""
        with self._changed:
            return self._cache.no_room(chunk)

    def views(self, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For HostCopy: the chunk's bytes, flat, and a pin on them, which is a tensor, too."""
        with self._changed:
            pin = self._cache.tensor(chunk, self._dtype)
            return self._cache.tensor(chunk, self._dtype, pinned=False), pin

    def note_done(self, chunk: int, op: Operation) -> None:
        """For HostCopy: the operation that brings the chunk was waited for."""
        with self._changed:
            self._cache.note_done(chunk, op)

    def note_released(self, copy: HostCopy) -> None:
        """For HostCopy: its pin has ended."""
        with self._changed:
            self._started.discard(copy)
            self._changed.notify_all()

    def finish_transfers(self) -> None:
        """Waits for all transfers under way. Raises what one met."""
        with self._changed:
            self._cache.finish_transfers()

    def clear(self) -> None:
        """Forgets all copies. Raises what a transfer met."""
        with self._changed:
            self._cache.clear()

    def refit(self) -> None:
        """The arena was resized while no copy was held."""
        with self._changed:
            self._cache.refit()


class SharedWriteBackCache(SharedCache):
    """A SharedCache of chunks that change in their slots."""

    _cache: WriteBackCache

    def fill(self, chunk: int) -> AbstractContextManager[torch.Tensor]:
        """Flat memory for the chunk's new bytes; call changed() in the block when they are there.

        Raises BudgetError if there is no room and none comes in time.
        """
        return self._pinned(chunk, self._cache.create)

    def changed(self, chunk: int) -> None:
        """The bytes that open() or fill() gave were changed; returns when they are home."""
        with self._changed:
            self._cache.dirty(chunk)
            self._cache.write_back(chunk)
            self._cache.get(chunk)
