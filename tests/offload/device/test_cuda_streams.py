"""offload/device/cuda_backend: streams in any order that events allow, pins, events."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import random
import signal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.device.cuda_backend import CudaBackend
from offload.device.device_arena import DeviceArena, PageLockedArena
from offload.errors import BudgetError, HeteroError
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account, Tier
from offload.profile.measure import measure_cuda
from tests.support.native.fake_cuda import FakeRuntime
from tests.support.training.planning import make_profile

SLOT = 4096


def make(slots: int = 3, eager: bool = False) -> tuple[FakeRuntime, CudaBackend, DeviceArena]:
    runtime = FakeRuntime(page_lockable=False, eager=eager)
    backend = CudaBackend(runtime)
    arena = backend.arena(slots, SLOT, Ledger({}), Account.GATHERED)
    assert isinstance(arena, DeviceArena)
    return runtime, backend, arena


@given(seed=st.integers(0, 1 << 32), length=st.integers(20, 200), several=st.booleans())
def test_work_sees_what_was_fetched_for_it(seed: int, length: int, several: bool) -> None:
    """Slots are fetched to, pinned, used by work that is given then and later, in the stream of the
    pin and in another one that shares it, and let go; streams run anyhow."""
    chance = random.Random(seed)
    runtime, backend, arena = make()
    computes = [runtime.compute, *([runtime.new_stream()] if several else [])]
    content: dict[int, tuple[int, range]] = {}  # slot -> what was fetched there last, and to where
    views: list[tuple[range, torch.Tensor]] = []
    offloaded: list[tuple[torch.Tensor, list[int]]] = []
    wrong: list[str] = []

    def give_work(slots: range) -> None:
        """It has the memory, not the pin: that ends on the host while work is waiting."""
        alias = torch.from_dlpack(arena.memory.export(slots.start * SLOT, len(slots) * SLOT))
        expected = [content[slot][0] for slot in slots]

        def use() -> None:
            if not all(
                bool((r == e).all()) for r, e in zip(alias.split(SLOT), expected, strict=True)
            ):
                wrong.append(f"{alias[::SLOT]} instead of {expected}")

        runtime.give(runtime.compute, use, reads=[(alias.data_ptr(), alias.nbytes)])
        if chance.random() < 0.3:
            into = torch.zeros_like(alias)
            backend.to_ram(into, alias)
            offloaded.append((into[::SLOT], expected))
            # What is offloaded is kept until it is there; so the slot stays pinned in truth.
            runtime.wait(runtime.compute, runtime.record(backend._draining.stream))

    for turn in range(length):
        first = chance.randrange(arena.slots)
        slots = range(first, chance.randint(first + 1, arena.slots))
        runs = (run for _, run in content.values() if set(run) & set(slots))
        touched = set(slots).union(*runs)
        pinned = [each for each in views if set(each[0]) & touched]
        runtime.compute = chance.choice(computes)
        what = chance.random()
        if what < 0.3 and not pinned:
            value = turn % 251 + 1
            source = torch.full((len(slots) * SLOT,), value, dtype=torch.uint8)
            backend.fetch(arena.view(first, len(slots), torch.uint8), source)
            for slot in touched & content.keys():  # what is overwritten in part is not used again
                del content[slot]
            content |= dict.fromkeys(slots, (value, slots))
        elif 0.3 <= what < 0.5 and (pinned or content.keys() >= set(slots)):
            slots = pinned[0][0] if pinned else slots  # whose pins count as one
            view = arena.view(slots.start, len(slots), torch.uint8, pinned=True)
            views.append((slots, view))
            give_work(slots)
            del view
        elif 0.5 <= what < 0.6 and pinned:
            arena.share(pinned[0][1])
            give_work(pinned[0][0])
        elif 0.6 <= what < 0.9 and pinned:
            views = [each for each in views if each is not pinned[0]]
        else:
            for _ in range(chance.randrange(4)):
                runtime.step(chance.choice(runtime.streams))
        del pinned
    runtime.synchronize_all()
    assert not wrong
    assert all(into.tolist() == expected for into, expected in offloaded)
    views.clear()
    arena.close()
    backend.close()


def test_a_fetch_to_a_slot_that_was_not_used_waits_for_nothing() -> None:
    runtime, backend, arena = make(2)
    while runtime.step(runtime.compute):
        pass  # what came before the arena's memory
    runtime.give(runtime.compute, lambda: None)
    copy = backend.fetch(arena.view(1, 1, torch.uint8), torch.full((SLOT,), 7, dtype=torch.uint8))
    while runtime.step(backend._fetching.stream):
        pass
    assert copy.done()
    assert runtime.synchronized == 0
    runtime.synchronize_all()


def test_a_fetch_that_begins_in_mid_slot_waits_for_all_slots_that_it_touches() -> None:
    runtime, backend, arena = make(3)
    while runtime.step(runtime.compute):
        pass  # what came before the arena's memory
    wrong: list[bool] = []
    pinned = arena.view(1, 1, torch.uint8, pinned=True)
    pinned.fill_(3)
    alias = torch.from_dlpack(arena.memory.export(SLOT, SLOT))
    runtime.give(runtime.compute, lambda: wrong.append(not bool((alias == 3).all())))
    del pinned
    to = arena.view(0, 2, torch.uint8)[SLOT // 2 :][:SLOT]
    backend.fetch(to, torch.full((SLOT,), 7, dtype=torch.uint8))
    while runtime.step(backend._fetching.stream):
        pass
    runtime.synchronize_all()
    assert wrong == [False]
    assert len(arena.before_write(1, 1)) == 1  # which follows the copy


def test_a_copy_to_new_memory_waits_for_work_that_reads_what_was_there() -> None:
    runtime, backend, other = make(1)
    old = runtime.empty(2 * SLOT).fill_(3)
    alias = runtime.memory_at(old)
    seen: list[int] = []
    runtime.give(runtime.compute, lambda: seen.append(int(alias.float().mean())))
    address = old.data_ptr()
    del old  # the allocator may give it away: later work of this stream comes after the reader
    arena = backend.arena(2, SLOT, Ledger({}), Account.GATHERED)
    assert arena.address(0) == address
    backend.fetch(arena.view(1, 1, torch.uint8), torch.full((SLOT,), 9, dtype=torch.uint8))
    while runtime.step(backend._fetching.stream):
        pass
    runtime.synchronize_all()
    assert seen == [3]
    arena.close()
    other.close()
    backend.close()


def test_capturing_a_graph_is_refused() -> None:
    runtime, backend, arena = make(1)
    runtime.captures = True
    with pytest.raises(HeteroError, match="CUDA graph is being captured"):
        arena.view(0, 1, torch.uint8, pinned=True)
    with pytest.raises(HeteroError, match="CUDA graph is being captured"):
        backend.to_ram(torch.empty(4), torch.empty(4))
    runtime.captures = False
    assert arena.live_views() == 0
    runtime.synchronize_all()


def test_views_outlive_the_arena() -> None:
    runtime, _, arena = make(1)
    view = arena.view(0, 1, torch.uint8, pinned=True)
    view.fill_(3)
    runtime.synchronize_all()
    arena.close()
    arena.close()
    assert bool((view == 3).all())


def test_the_device_is_charged_from_the_start_and_refused_with_numbers() -> None:
    runtime = FakeRuntime(total=1 << 20)
    ledger = Ledger({Tier.DEVICE: 2 << 20})
    backend = CudaBackend(runtime)
    arena = backend.arena(2, SLOT, ledger, Account.PARAM)
    assert ledger.used(Tier.DEVICE, Account.PARAM) == 2 * SLOT
    arena.commit(0, 2)
    assert ledger.used(Tier.DEVICE, Account.PARAM) == 2 * SLOT
    with pytest.raises(BudgetError, match=r"the device has no room for 1.4 MiB \(grad\)"):
        backend.arena(350, SLOT, ledger, Account.GRAD)
    with pytest.raises(BudgetError, match="would pass the device budget"):
        backend.arena(1000, SLOT, ledger, Account.GRAD)
    assert ledger.used(Tier.DEVICE, Account.GRAD) == 0
    arena.close()
    assert ledger.in_use_bytes["device"] == 0


class TestPinned:
    @pytest.fixture
    def runtime(self) -> FakeRuntime:
        return FakeRuntime()

    def arena(self, runtime: FakeRuntime, slots: int) -> PageLockedArena:
        return PageLockedArena(runtime, [], slots, SLOT, Ledger({}), Account.PARAM)

    def ranges(self, runtime: FakeRuntime, arena: PageLockedArena) -> list[tuple[int, int]]:
        base = arena.address(0)
        return sorted(((a - base) // SLOT, n // SLOT) for a, n in runtime.page_locked.items())

    def test_what_is_committed_at_once_is_one_range(self, runtime: FakeRuntime) -> None:
        arena = self.arena(runtime, 8)
        assert runtime.page_locked == {}
        arena.commit(2, 3)
        arena.commit(2, 3)
        assert self.ranges(runtime, arena) == [(2, 3)]
        arena.commit(0, 8)
        assert self.ranges(runtime, arena) == [(0, 2), (2, 3), (5, 3)]
        arena.close()
        assert runtime.page_locked == {}

    def test_a_forked_child_has_none_of_it(self, runtime: FakeRuntime) -> None:
        arena = self.arena(runtime, 3)
        arena.commit(1)
        slots = [arena.view(slot, 1, torch.uint8).fill_(7).numpy() for slot in range(3)]

        def read_in_child(slot: int) -> int:
            child = os.fork()
            if child == 0:
                faulthandler.disable()
                # Without torch, whose threads are not here.
                os._exit(int(slots[slot][0]))
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        assert [read_in_child(slot) for slot in range(3)] == [7, -signal.SIGSEGV, 7]
        arena.close()

    def test_pages_are_populated_before_they_are_page_locked(
        self, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        absent: list[int] = []
        register = runtime.register

        def registered(address: int, nbytes: int) -> str | None:
            pages = (ctypes.c_ubyte * (nbytes // SLOT))()
            arguments = ctypes.c_void_p(address), ctypes.c_size_t(nbytes), pages
            assert ctypes.CDLL(None).mincore(*arguments) == 0
            absent.append(sum(not page & 1 for page in pages))
            return register(address, nbytes)

        monkeypatch.setattr(runtime, "register", registered)
        arena = self.arena(runtime, 600)
        arena.commit(1, 300)
        arena.view(1, 300, torch.uint8).fill_(7)
        arena.commit(0, 600)
        assert absent == [0, 0, 0]
        assert bool((arena.view(1, 300, torch.uint8) == 7).all())
        arena.close()


def test_a_device_is_measured() -> None:
    runtime = FakeRuntime()
    found = measure_cuda(runtime, copy_bytes=SLOT, numel=4096, shapes=((16, 16, 16),), devices=1)
    profile = make_profile(**found)
    assert profile.separate
    assert profile.device_bytes == runtime.total
    assert set(profile.device_update_bytes_per_s or {}) == {"bf16", "fp16", "fp32"}
    assert runtime.page_locked == {}


def test_an_arena_that_finds_no_room_has_no_slots() -> None:
    runtime = FakeRuntime(total=1 << 20)
    ledger = Ledger({Tier.DEVICE: None})
    arena = DeviceArena(runtime, 2, 4096, ledger, Account.GATHERED)
    with pytest.raises(BudgetError, match="the device has no room"):
        arena.resize(1 << 10)
    assert (arena.slots, arena.is_open, arena.slot_of(4096)) == (0, False, None)
    assert ledger.in_use_bytes["device"] == 0
    arena.resize(3)
    assert ledger.in_use_bytes["device"] == 3 * 4096
    arena.close()


def test_a_fetch_looks_at_one_arena_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Homes on a device have an arena each; some are gone, one has another place."""
    _, backend, arena = make()
    ledger = Ledger({})
    arenas = [backend.arena(1, SLOT, ledger, Account.PARAM) for _ in range(200)]
    for closed in arenas[::3]:
        closed.close()
    del arenas[::3], closed
    arenas[0].resize(2)
    source = torch.ones(SLOT, dtype=torch.uint8)
    backend.fetch(arena.view(0, 1, torch.uint8), source).wait()
    looked: list[int] = []
    slot_of = DeviceArena.slot_of
    monkeypatch.setattr(
        DeviceArena, "slot_of", lambda self, at: looked.append(at) or slot_of(self, at)
    )
    for one in (arena, *arenas):
        backend.fetch(one.view(one.slots - 1, 1, torch.uint8), source).wait()
        assert bool((one.view(one.slots - 1, 1, torch.uint8) == 1).all())
    assert len(looked) == 1 + len(arenas)
    for one in (arena, *arenas):
        one.close()
    backend.close()


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_memory_is_freed_behind_a_copy_that_uses_it(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    found: list[str] = []
    monkeypatch.setattr("sys.unraisablehook", lambda e: found.append(str(e.exc_value)))
    runtime, _, arena = make(1)
    view, ram = arena.view(0, 1, torch.uint8), torch.zeros(SLOT, dtype=torch.uint8)
    runtime.copy(view, ram, runtime.new_stream())
    if not waits:
        monkeypatch.setattr(runtime, "wait", lambda stream, event: None)
    arena.close()
    del view
    gc.collect()
    no_order = "none waits for the other's event"
    assert [no_order in words for words in found] == ([] if waits else [True])
    assert runtime.copying  # which the host did not wait for


def test_copies_keep_no_more_events_than_are_waited_for() -> None:
    runtime, backend, arena = make(2, eager=True)
    source = torch.zeros(SLOT, dtype=torch.uint8)
    kept = []
    for number in range(40):
        copy = backend.fetch(arena.view(number % 2, 1, torch.uint8), source)
        view = arena.view(number % 2, 1, torch.uint8, pinned=True)
        del view
        if number % 4 == 3:
            copy.wait()
        kept.append(len(runtime.events))
    assert max(kept) == max(kept[:8])
    copy.wait()
    arena.close()
    backend.close()


def test_resident_slots_keep_one_event_for_each_stream() -> None:
    """Work uses them in every step, and no copy to them ever takes their events."""
    runtime, backend, arena = make(3, eager=True)
    for _ in range(10):
        views = [arena.view(slot, 1, torch.uint8, pinned=True) for slot in range(3)]
        views.clear()
    assert len(runtime.events) <= 3
    arena.close()
    backend.close()


def test_other_threads_come_after_the_stream_that_leads_them() -> None:
    """What they give goes to the default stream."""
    runtime, backend, _ = make()
    done: list[str] = []
    side = runtime.new_stream()
    runtime.give(side, lambda: done.append("update"))
    with runtime.on(side):
        backend.lead_threads()
    backend.lead_threads()  # (No stream waits for itself.)
    runtime.give(runtime.default_stream, lambda: done.append("read"))
    runtime.synchronize_all()
    assert done == ["update", "read"]
