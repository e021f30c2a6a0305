"""offload/memory/slot_pool: slots in RAM and on a device, their number, and runs beyond it."""

from __future__ import annotations

import pytest
import torch

from offload.device.device_arena import DeviceArena
from offload.errors import BudgetError
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.slot_pool import DevicePool, SlotPool
from offload.memory.tiers import Account, Tier
from tests.support.native.fake_cuda import FakeRuntime

SLOT = 4096


def make(slots: int, limit: int, budget: int) -> tuple[SlotPool, Ledger]:
    ledger = Ledger({Tier.HOST: budget * SLOT})
    return SlotPool(HostArena(slots, SLOT, ledger, Account.BUCKET), limit), ledger


def in_use(ledger: Ledger) -> int:
    return ledger.in_use_bytes["host"] // SLOT


def test_other_numbers_of_slots_are_charged() -> None:
    pool, ledger = make(6, 4, 6)
    assert in_use(ledger) == 4
    pool.refit(6, 1)
    assert in_use(ledger) == 1
    assert pool.take(2) is None
    pool.refit(6, 5)
    assert in_use(ledger) == 5
    first = pool.take(5)
    assert first == 0
    pool.give_back(first, 5)
    pool.refit(0, 0)
    assert in_use(ledger) == 0
    pool.refit(3, 3)
    assert pool.take(3) == 0
    pool.give_back(0, 3)
    with pytest.raises(BudgetError):
        pool.refit(9, 9)
    pool.arena.close()
    assert in_use(ledger) == 0


def test_a_budget_cannot_become_less_than_what_is_in_use() -> None:
    pool, ledger = make(6, 4, 6)
    with pytest.raises(BudgetError, match="cannot become"):
        ledger.set_budget(Tier.HOST, 3 * SLOT)
    assert ledger.budget_bytes["host"] == 6 * SLOT
    ledger.set_budget(Tier.HOST, 4 * SLOT)
    with pytest.raises(BudgetError):
        pool.take(5, beyond=True)
    pool.arena.close()


def make_on_device(limit: int, budget: int) -> tuple[DevicePool, Ledger]:
    runtime, ledger = FakeRuntime(), Ledger({Tier.DEVICE: budget * SLOT})

    def arena(slots: int) -> DeviceArena:
        return DeviceArena(runtime, slots, SLOT, ledger, Account.BUCKET)

    return DevicePool(arena, limit), ledger


def test_runs_beyond_the_limit_come_and_go_in_the_devices_order() -> None:
    """In the middle of backward, where the host must not wait for the device."""
    runtime, ledger = FakeRuntime(), Ledger({Tier.DEVICE: 3 * SLOT})
    waits: list[None] = []
    runtime.synchronize_all = lambda: waits.append(None)  # type: ignore[method-assign]
    arenas: list[DeviceArena] = []

    def arena(slots: int) -> DeviceArena:
        arenas.append(DeviceArena(runtime, slots, SLOT, ledger, Account.BUCKET))
        return arenas[-1]

    pool = DevicePool(arena, 1)
    for run in (1, 2, 1):
        first = pool.take(run, beyond=True)
        assert first is not None
        beyond = pool.take(run, beyond=True) if run == 1 else None
        with pytest.raises(BudgetError):
            pool.take(3, beyond=True)
        pool.give_back(first, run)
        if beyond is not None:
            pool.give_back(beyond, run)
        assert used(ledger) == 1
    assert waits == []
    assert len(arenas) == 1 + 2  # that of the limit, and as many as were wanted at once


def used(ledger: Ledger) -> int:
    return ledger.used(Tier.DEVICE, Account.BUCKET) // SLOT


def test_runs_up_to_the_limit_and_beyond_it() -> None:
    pool, ledger = make_on_device(limit=3, budget=5)
    first, second = pool.take(2), pool.take(1)
    assert first is not None
    assert second is not None
    assert pool.take(1) is None
    assert used(ledger) == 3
    beyond = pool.take(2, beyond=True)
    assert beyond is not None
    assert used(ledger) == 5
    with pytest.raises(BudgetError):
        pool.take(1, beyond=True)
    views = [pool.view(f, n, torch.uint8) for f, n in ((first, 2), (second, 1), (beyond, 2))]
    for value, view in enumerate(views):
        view.fill_(value)
    assert [sorted(set(view.tolist())) for view in views] == [[0], [1], [2]]
    del view, views
    pool.give_back(beyond, 2)
    assert used(ledger) == 3
    pool.give_back(first, 2)
    assert pool.take(2) == first


def test_the_limit_changes() -> None:
    pool, ledger = make_on_device(limit=1, budget=4)
    assert used(ledger) == 1
    pool.refit(0, 0)
    assert used(ledger) == 0
    assert pool.take(1) is None
    pool.refit(4, 4)
    assert pool.take(4) is not None
