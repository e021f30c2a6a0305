"""Which chunk each slot of an arena holds, and which slots another chunk should take.

Slots are taken from the chunk whose next use is farthest (Belady's rule), of equals from the one
that has had them longest, and only if nothing pins them. Looking for one slot takes a time that
does not grow with the number of slots: chunks are kept in a heap by their next use, and pins are
counted only of those that the heap offers. A run of several slots is looked for among all chunks in
the arena, once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

from offload.cache.use_order import NEVER, UseOrder
from offload.memory.arena import HostArena

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
