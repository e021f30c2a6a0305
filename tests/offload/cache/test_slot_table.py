"""offload/cache/slot_cache: it finds the slots that a search through all windows finds."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.cache.slot_cache import SlotCache, SlotTable, UseOrder, WriteBackCache
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account
from tests.support.native.cache_rig import next_use

PAGE = 4096
RUNS = [1, 1, 1, 1, 1, 1, 2, 2, 3, 4]


class Pins:
    """Counts of pins that a test sets, and how often they were asked for."""

    def __init__(self, slots: int) -> None:
        self.counts = [0] * slots
        self.asked = 0

    def __getitem__(self, slot: int) -> int:
        self.asked += 1
        return self.counts[slot]


class Model:
    """The same table as a dict, searched window by window."""

    def __init__(self, slots: int, order: UseOrder) -> None:
        self.order = order
        self.slot_of: dict[int, int] = {}
        self.pins = [0] * slots
        self.run_at: dict[int, int] = {}

    def pinned(self) -> list[bool]:
        found = [False] * len(self.pins)
        for first, run in self.run_at.items():
            if self.pins[first]:
                found[first : first + run] = [True] * run
        return found

    def owners(self, slot: int, run: int) -> list[int]:
        return [
            chunk
            for chunk, first in self.slot_of.items()
            if first < slot + run and slot < first + RUNS[chunk]
        ]

    def best(self, run: int, limit: int, kept: set[int], until: int | None) -> int | None:
        pinned = self.pinned()
        best, found = None, None
        firsts = range(limit - run + 1)
        for first in reversed(firsts) if run == 1 else firsts:
            owners = self.owners(first, run)
            if any(pinned[first : first + run]) or kept & set(owners):
                continue
            soonest = min(map(partial(next_use, self.order), owners), default=1 << 62)
            if until is not None and soonest <= next_use(self.order, until):
                continue
            # Those in the table are in the order in which they came.
            newest = max((list(self.slot_of).index(chunk) for chunk in owners), default=-1)
            cost = soonest, -len(owners), -newest
            if best is None or cost > best:
                best, found = cost, first
        return found


@given(data=st.data())
def test_any_search_finds_what_a_search_through_all_windows_finds(data) -> None:
    slots = data.draw(st.integers(4, 9))
    order, pins = UseOrder(), Pins(slots)
    arena = SimpleNamespace(slots=slots, pins=pins)
    table, model = SlotTable(arena, dict(enumerate(RUNS)), order), Model(slots, order)
    pins.counts = model.pins
    chunks = st.integers(0, len(RUNS) - 1)
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["note", "note", "end", "take", "take", "drop", "pin"]))
        chunk = data.draw(chunks)
        kept = data.draw(st.sets(chunks, max_size=2))
        taken = max((slot + RUNS[c] for c, slot in model.slot_of.items()), default=0)
        limit = data.draw(st.integers(max(RUNS[chunk], taken), slots))
        until = chunk if next_use(order, chunk) != 1 and data.draw(st.booleans()) else None
        found = table.best_slots(
            RUNS[chunk],
            limit,
            lambda other, kept=kept: other not in kept,
            -1 if until is None else order.next_use_number(until),
        )
        assert found == model.best(RUNS[chunk], limit, kept, until)
        if action == "note":
            order.note(chunk)
        elif action == "end":
            order.end_step()
        elif action == "drop" and chunk in table:
            table.remove(chunk)
            del model.slot_of[chunk]
        elif action == "pin":
            slot = data.draw(st.integers(0, slots - 1))
            if pins.counts[slot] or slot in model.slot_of.values():
                pins.counts[slot] = 1 - pins.counts[slot]
        elif action == "take" and chunk not in table and found is not None:
            for other in model.owners(found, RUNS[chunk]):
                table.remove(other)
                del model.slot_of[other]
            table.add(chunk, found)
            model.slot_of[chunk] = found
            model.run_at[found] = RUNS[chunk]
        assert table.pinned_slots() == sum(model.pinned())
        assert all(table.owners(s, 1) == model.owners(s, 1) for s in range(slots))


class Transfers:
    """A backing whose transfers are done at once."""

    def read(self, chunk: int, slot: int) -> Transfers:
        return self

    write = read

    def wait(self) -> None:
        pass

    def cancel(self) -> None:
        pass


@pytest.mark.parametrize("prefetch", [0, 4])
def test_the_work_of_a_use_does_not_grow_with_the_slots(prefetch: int, monkeypatch) -> None:
    """Counted: pins and next uses that are looked at. Each use takes the slot of another chunk."""
    work: dict[int, float] = {}
    for slots in (16, 1024):
        arena = HostArena(slots, PAGE, Ledger({}), Account.GATHERED)
        order = UseOrder()
        cache = SlotCache(arena, Transfers(), dict.fromkeys(range(4 * slots), 1), order, str)
        forward = range(4 * slots)
        uses = [*forward, *reversed(forward)]
        for chunk in uses:
            order.note(chunk)
        order.end_step()
        asked = itertools.count()
        number = order.next_use_number

        def counted(chunk: int, asked=asked, number=number) -> int:
            next(asked)
            return number(chunk)

        monkeypatch.setattr(order, "next_use_number", counted)
        arena.pins, pins = Pins(slots), arena.pins
        before = 0
        for use, chunk in enumerate(uses):
            if use == 2 * slots:  # all slots have been taken
                before = next(asked) + arena.pins.asked
            order.note(chunk)
            cache.get(chunk)
            arena.pins.counts[arena.slot_of(cache.address(chunk))] = 1
            cache.prefetch(prefetch)
            arena.pins.counts[arena.slot_of(cache.address(chunk))] = 0
        assert all(pins[slot] == 0 for slot in range(slots))
        work[slots] = (next(asked) + arena.pins.asked - before) / (len(uses) - 2 * slots)
        cache.close()
        arena.close()
    assert work[16] < 24
    assert work[1024] < 24


@pytest.mark.parametrize("run", [1, 2])
def test_writes_have_time_until_all_slots_were_taken_once(run: int) -> None:
    """As gradients in backward, of which no order is known: each is written when it is complete."""
    chunks, fits = range(12), 4

    class Write(Transfers):
        """Of a chunk, which must not be waited for before `fits` more were begun."""

        def __init__(self, chunk: int) -> None:
            self.chunk = chunk

        def wait(self) -> None:
            assert self.chunk <= filling - fits

    class Backing(Transfers):
        def write(self, chunk: int, slot: int) -> Transfers:
            return Write(chunk)

    arena = HostArena(fits * run, PAGE, Ledger({}), Account.GRAD_SLOT)
    cache = WriteBackCache(arena, Backing(), dict.fromkeys(chunks, run), UseOrder(), str)
    for filling in chunks:
        cache.create(filling)
        cache.dirty(filling)
        cache.write_back(filling)
    filling = len(chunks) + fits
    cache.close()
    arena.close()
