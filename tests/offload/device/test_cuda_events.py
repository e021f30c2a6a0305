"""offload/device/cuda_runtime: events are used again when nobody has them, and not before."""

from __future__ import annotations

import gc

import pytest
import torch

from offload.device.cuda_backend import CudaBackend
from offload.device.cuda_runtime import Event, EventPool
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account
from tests.support.native.fake_cuda import FakeEvent, FakeRuntime

SLOT = 4096


class Counted(EventPool):
    """How many events of the device were made."""

    def __init__(self) -> None:
        self.made = 0
        super().__init__(self._make_one)

    def _make_one(self) -> FakeEvent:
        self.made += 1
        return FakeEvent()


def test_an_event_that_nobody_has_is_used_again() -> None:
    pool = Counted()
    first, second = pool.take(), pool.take()
    assert first.raw is not second.raw
    raw = first.raw
    del first
    assert pool.take().raw is raw
    assert pool.made == 2
    assert second.raw is not raw


def test_a_cycle_gives_its_event_back_to_the_garbage_collector() -> None:
    pool = Counted()
    cycle: list[object] = [pool.take()]
    cycle.append(cycle)
    del cycle
    gc.collect()
    pool.take()
    assert pool.made == 1


def test_copies_make_no_more_events_than_are_waited_for() -> None:
    runtime = FakeRuntime(page_lockable=False)
    pool = runtime.events = Counted()
    backend = CudaBackend(runtime)
    arena = backend.arena(2, SLOT, Ledger({}), Account.GATHERED)
    source = torch.zeros(SLOT, dtype=torch.uint8)
    for number in range(40):
        copy = backend.fetch(arena.view(number % 2, 1, torch.uint8), source)
        view = arena.view(number % 2, 1, torch.uint8, pinned=True)
        del view
        if number % 4 == 3:
            copy.wait()
        if number == 7:
            made = pool.made
    assert pool.made == made
    copy.wait()
    arena.close()
    backend.close()


def test_resident_slots_keep_one_event_for_each_stream() -> None:
    """Work uses them in every step, and no copy to them ever takes their events."""
    runtime = FakeRuntime(page_lockable=False)
    pool = runtime.events = Counted()
    backend = CudaBackend(runtime)
    arena = backend.arena(3, SLOT, Ledger({}), Account.PARAM)
    for _ in range(10):
        views = [arena.view(slot, 1, torch.uint8, pinned=True) for slot in range(3)]
        views.clear()
    assert pool.made <= 3
    arena.close()
    backend.close()


class Hasty(EventPool):
    """Gives an event out again although somebody has it."""

    def __init__(self) -> None:
        super().__init__(FakeEvent)
        self._raw = FakeEvent()

    def take(self) -> Event:
        return Event(self._raw, self._free)


def test_the_fake_device_finds_an_event_that_is_used_again_too_early() -> None:
    runtime = FakeRuntime(eager=False)
    runtime.events = Hasty()
    first = runtime.record(runtime.compute)
    second = runtime.record(runtime.new_stream())
    for use in (runtime.done, runtime.synchronize, lambda e: runtime.wait(runtime.compute, e)):
        with pytest.raises(AssertionError, match="recorded anew that somebody has"):
            use(first)
    assert not runtime.done(second)
