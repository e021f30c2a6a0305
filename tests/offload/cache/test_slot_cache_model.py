"""offload/cache in random use, against a model."""

import contextlib
import errno
from functools import partial
from types import SimpleNamespace

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from offload import _native
from offload.cache import slot_cache as cache_module
from offload.cache.slot_cache import SlotState
from offload.errors import BudgetError
from tests.support.native.cache_rig import SLOT, Rig, next_use, pattern

SLOTS = 6
RUNS = [1, 1, 1, 1, 1, 2, 2, 3, 4]
MOST_PINS = 4
chunks = st.integers(0, len(RUNS) - 1)


class CacheMachine(RuleBasedStateMachine):
    """Random use, against a dict of what each chunk's bytes must be."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(SLOTS, RUNS)
        self.cache = self.rig.cache
        self.rig.before_write = self.before_write
        # Collecting takes as long as all else together; test_slot_cache.py has a test about it.
        cache_module.gc = SimpleNamespace(collect=lambda: 0)
        # The truth per chunk, in the file and now; None: it cannot be known.
        self.on_file = {c: self.rig.on_file(c) for c in self.rig.extents}
        self.now = dict(self.on_file)
        self.unwritten: set[int] = set()
        self.pins: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.locked: set[int] = set()
        self.faults = 0
        self.version = 1000

    def teardown(self) -> None:
        import gc

        cache_module.gc = gc
        self.pins.clear()
        self.rig.close()

    def before_write(self, chunk: int) -> None:
        assert self.rig.is_dirty(chunk), "written although the file has its bytes"
        self.on_file[chunk] = self.now[chunk]
        self.unwritten.discard(chunk)

    # What is about to be asked for, and what may come of it.

    def has_room(self, chunk: int) -> bool:
        blocked = [False] * SLOTS
        held = [(self.rig.arena.slot_of(pin.data_ptr()), c) for c, pin, _ in self.pins]
        held += [(self.rig.arena.slot_of(self.cache.address(c)), c) for c in self.locked]
        for first, c in held:
            blocked[first : first + RUNS[c]] = [True] * RUNS[c]
        run = RUNS[chunk]
        return any(not any(blocked[s : s + run]) for s in range(SLOTS - run + 1))

    @contextlib.contextmanager
    def asked(self, chunk: int | None = None):
        """Lets injected faults surface, each once, and BudgetError where there is no room."""
        is_held = chunk is None or self.cache.holds(chunk)
        no_room = not is_held and not self.has_room(chunk)
        reads = self.rig.reads.count(chunk)
        try:
            yield
        except _native.NativeIoError as error:
            self.surfaced(error)
        except BudgetError:
            assert no_room, "there was a window that nothing pins"
        else:
            assert not no_room, "found room where there is none"
            assert not is_held or self.rig.reads.count(chunk) == reads, "read although it is held"

    def surfaced(self, failure: _native.NativeIoError) -> None:
        assert failure.errno == errno.EIO
        assert self.faults > 0, "a transfer failed for no reason"
        self.faults -= 1
        self.locked &= self.rig.held()  # a failed read leaves nothing to pin
        assert failure.op == "read" or any(map(self.write_failed, self.rig.held()))

    def write_failed(self, chunk: int) -> bool:
        """It is dirty although it was not changed since its last write began."""
        return self.rig.is_dirty(chunk) and chunk not in self.unwritten

    def check(self, chunk: int, content: torch.Tensor) -> None:
        if self.now[chunk] is None:
            self.now[chunk] = self.on_file[chunk] = content.clone()
        assert torch.equal(content, self.now[chunk])

    def fill(self, chunk: int, pin: torch.Tensor) -> None:
        self.version += 1
        content = pattern(len(pin), self.version)
        pin.copy_(content)
        self.now[chunk] = content
        self.unwritten.add(chunk)
        self.pins = [
            (c, t, content if t.data_ptr() == pin.data_ptr() else kept) for c, t, kept in self.pins
        ]

    def keep(self, chunk: int, pin: torch.Tensor) -> None:
        if len(self.pins) < MOST_PINS:
            self.pins.append((chunk, pin, pin.clone()))

    @rule(chunk=chunks, keep=st.booleans())
    def use(self, chunk, keep):
        with self.asked(chunk):
            pin = self.rig.use(chunk)
            self.check(chunk, pin)
            if keep:
                self.keep(chunk, pin)

    @rule(chunk=chunks, keep=st.booleans())
    def change(self, chunk, keep):
        with self.asked(chunk):
            pin = self.rig.use(chunk)
            self.check(chunk, pin)
            self.cache.dirty(chunk)
            self.fill(chunk, pin)
            if keep:
                self.keep(chunk, pin)

    @rule(chunk=chunks, keep=st.booleans())
    def make(self, chunk, keep):
        reads = self.rig.reads.count(chunk)
        with self.asked(chunk):
            self.cache.create(chunk)
            assert self.rig.reads.count(chunk) == reads
            pin = self.rig.tensor(chunk)
            # Settled by create(), so that this cannot fail between the bytes and their mark.
            self.cache.dirty(chunk)
            self.fill(chunk, pin)
            if keep:
                self.keep(chunk, pin)

    @rule(chunk=chunks)
    def write_back(self, chunk):
        if self.cache.holds(chunk):
            with self.asked():
                self.cache.write_back(chunk)

    @rule(chunk=chunks)
    def drop(self, chunk):
        with self.asked():
            if self.write_failed(chunk):
                self.on_file[chunk] = None
            self.cache.drop(chunk)
            self.locked.discard(chunk)
            self.unwritten.discard(chunk)
            self.now[chunk] = self.on_file[chunk]

    @rule(depth=st.integers(0, 6))
    def prefetch(self, depth):
        before = {c: self.rig.state(c) for c in self.rig.held()}
        self.cache.prefetch(depth)
        after = self.rig.held()
        given_up, begun = before.keys() - after, after - before.keys()
        assert begun <= set(self.rig.order.upcoming(depth))
        assert all(self.rig.state(c) is SlotState.READING for c in begun)
        soon = partial(next_use, self.rig.order)
        for chunk in given_up:
            assert before[chunk] is SlotState.CLEAN
            assert soon(chunk) > min(map(soon, begun))

    @rule(which=st.integers(0, MOST_PINS - 1))
    def release(self, which):
        del self.pins[which : which + 1]

    @rule(chunk=chunks)
    def lock(self, chunk):
        if self.cache.holds(chunk) and not self.locked:
            self.cache.lock(chunk)
            self.locked.add(chunk)

    @rule()
    def end_step(self):
        self.rig.order.end_step()

    @rule(op=st.sampled_from(["read", "write"]), nth=st.integers(0, 2))
    def break_a_transfer(self, op, nth):
        if self.faults < 2:
            self.rig.engine.inject(op, nth, error=errno.EIO)
            self.faults += 1

    @invariant()
    def held_bytes_are_right(self):
        for _, pin, kept in self.pins:
            assert torch.equal(pin, kept)

    @invariant()
    def entries_are_legal(self):
        slots: list[int] = []
        for chunk, entry in self.cache._entries.items():
            moving = entry.state in (SlotState.READING, SlotState.WRITING)
            assert moving == (entry.op is not None)
            slot = self.cache._table.slot_of(chunk)
            slots += range(slot, slot + RUNS[chunk])
        assert len(slots) == len(set(slots))
        assert all(0 <= slot < SLOTS for slot in slots)
        assert self.locked <= self.rig.held()

    @invariant()
    def unwritten_bytes_are_still_held(self):
        assert all(self.rig.is_dirty(chunk) for chunk in self.unwritten)

    @invariant()
    def the_budget_holds(self):
        assert self.rig.ledger.peak_bytes["host"] <= SLOTS * SLOT


CacheMachine.TestCase.settings = settings(stateful_step_count=50)
TestRandomUse = CacheMachine.TestCase
