"""offload/memory/slot_pool: slots for every day, and their number."""

from __future__ import annotations

import pytest

from offload.errors import BudgetError
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.slot_pool import SlotPool
from offload.memory.tiers import Account, Tier

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
