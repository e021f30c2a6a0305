"""offload/memory/slot_pool: slots of a device and of RAM, and runs beyond the limit."""

from __future__ import annotations

import pytest
import torch

from offload.device.device_arena import DeviceArena
from offload.errors import BudgetError
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.slot_pool import SlotPool
from offload.memory.tiers import Account, Tier
from tests.support.native.fake_cuda import FakeRuntime

SLOT = 4096


@pytest.fixture(params=[Tier.HOST, Tier.DEVICE])
def tier(request: pytest.FixtureRequest) -> Tier:
    found: Tier = request.param
    return found


def make(tier: Tier, limit: int, budget: int) -> tuple[SlotPool, Ledger]:
    runtime, ledger = FakeRuntime(), Ledger({tier: budget * SLOT})

    def arena(slots: int) -> HostArena:
        if tier is Tier.HOST:
            return HostArena(slots, SLOT, ledger, Account.BUCKET)
        return DeviceArena(runtime, slots, SLOT, ledger, Account.BUCKET)

    return SlotPool(arena, limit), ledger


def test_runs_beyond_the_limit_come_and_go_in_the_devices_order() -> None:
    """In the middle of backward, where the host must not wait for the device."""
    runtime, ledger = FakeRuntime(), Ledger({Tier.DEVICE: 3 * SLOT})
    waits: list[None] = []
    runtime.synchronize_all = lambda: waits.append(None)  # type: ignore[method-assign]
    arenas: list[DeviceArena] = []

    def arena(slots: int) -> DeviceArena:
        arenas.append(DeviceArena(runtime, slots, SLOT, ledger, Account.BUCKET))
        return arenas[-1]

    pool = SlotPool(arena, 1)
    for run in (1, 2, 1):
        first = pool.take(run, beyond=True)
        assert first is not None
        beyond = pool.take(run, beyond=True) if run == 1 else None
        with pytest.raises(BudgetError):
            pool.take(3, beyond=True)
        pool.give_back(first, run)
        if beyond is not None:
            pool.give_back(beyond, run)
        assert used(ledger, Tier.DEVICE) == 1
    assert waits == []
    assert len(arenas) == 1 + 2  # that of the limit, and as many as were wanted at once


def used(ledger: Ledger, tier: Tier) -> int:
    return ledger.used(tier, Account.BUCKET) // SLOT


def test_runs_up_to_the_limit_and_beyond_it(tier: Tier) -> None:
    pool, ledger = make(tier, limit=3, budget=5)
    first, second = pool.take(2), pool.take(1)
    assert first is not None
    assert second is not None
    assert pool.take(1) is None
    assert used(ledger, tier) == 3
    beyond = pool.take(2, beyond=True)
    assert beyond is not None
    assert used(ledger, tier) == 5
    with pytest.raises(BudgetError):
        pool.take(1, beyond=True)
    views = [pool.view(f, n, torch.uint8) for f, n in ((first, 2), (second, 1), (beyond, 2))]
    for value, view in enumerate(views):
        view.fill_(value)
    assert [sorted(set(view.tolist())) for view in views] == [[0], [1], [2]]
    del view, views
    pool.give_back(beyond, 2)
    assert used(ledger, tier) == 3
    pool.give_back(first, 2)
    assert pool.take(2) == first
    assert pool.take(1, beyond=True) is not None
    pool.close()  # whatever is taken still
    assert used(ledger, tier) == 0


def test_the_limit_changes(tier: Tier) -> None:
    pool, ledger = make(tier, limit=1, budget=4)
    assert used(ledger, tier) == 1
    pool.refit(0)
    assert used(ledger, tier) == 0
    assert pool.take(1) is None
    pool.refit(3)
    assert used(ledger, tier) == 3
    first = pool.take(3)
    assert first == 0
    pool.give_back(first, 3)
    with pytest.raises(BudgetError):
        pool.refit(5)
    pool.refit(4)
    assert pool.take(4) == 0


def test_a_budget_cannot_become_less_than_what_is_in_use() -> None:
    pool, ledger = make(Tier.HOST, limit=4, budget=6)
    with pytest.raises(BudgetError, match="cannot become"):
        ledger.set_budget(Tier.HOST, 3 * SLOT)
    assert ledger.budget_bytes["host"] == 6 * SLOT
    ledger.set_budget(Tier.HOST, 4 * SLOT)
    with pytest.raises(BudgetError):
        pool.take(5, beyond=True)
