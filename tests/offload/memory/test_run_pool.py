"""offload/memory/run_pool: runs of slots, charged while somebody needs them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import BudgetError
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.run_pool import Run, RunPool
from offload.memory.tiers import Account, Tier

SLOT = 4096


def make(slots: int, room: int, in_one: bool = False) -> tuple[RunPool, Ledger]:
    ledger = Ledger({Tier.HOST: slots * SLOT})
    arena = HostArena(slots, SLOT, ledger, Account.ACTIVATION)
    return RunPool(arena, lambda: room * SLOT, in_one), ledger


def charged(ledger: Ledger) -> int:
    return ledger.used(Tier.HOST, Account.ACTIVATION) // SLOT


def test_runs_are_charged_at_their_first_use_and_stay_so() -> None:
    pool, ledger = make(16, room=8)
    one, other = pool.take(3), pool.take(5)
    assert (one, other) == (Run(0, 3), Run(3, 5))
    assert charged(ledger) == 8
    assert pool.take(1) is None
    assert one is not None
    pool.give_back(one)
    assert charged(ledger) == 8
    assert pool.take(2) == Run(0, 2)
    pool.close()
    assert charged(ledger) == 0


def test_a_run_that_the_budget_refuses_stays_free() -> None:
    pool, ledger = make(8, room=8)
    ledger.charge(Tier.HOST, Account.BUFFER, 4 * SLOT)
    with pytest.raises(BudgetError):
        pool.take(5)
    assert pool.take(4) == Run(0, 4)
    pool.close()


def test_a_run_elsewhere_takes_the_charge_of_free_slots() -> None:
    pool, ledger = make(16, room=8)
    runs = [pool.take(2) for _ in range(4)]
    for run in (runs[0], runs[2]):
        assert run is not None
        pool.give_back(run)
    assert pool.take(4) == Run(8, 4)
    assert charged(ledger) == 8
    assert pool.take(2) is None
    pool.close()


def test_what_is_charged_is_given_again_although_there_is_less_room() -> None:
    room = [8 * SLOT]
    arena = HostArena(16, SLOT, Ledger({}), Account.ACTIVATION)
    pool = RunPool(arena, lambda: room[0])
    assert [pool.take(4), pool.take(4)] == [Run(0, 4), Run(4, 4)]
    pool.give_back(Run(4, 4))
    room[0] = 3 * SLOT
    assert pool.take(4) == Run(4, 4)
    pool.close()


def test_what_tensors_view_is_not_given_again() -> None:
    pool, _ = make(4, room=4)
    run = pool.take(3)
    assert run is not None
    tensor = pool.view(run, 3 * SLOT - 7)
    tensor.fill_(3)
    pool.give_back(run)
    assert pool.pinned_bytes == 3 * SLOT
    assert pool.take(2) is None
    assert not pool.shrink()
    assert tensor.unique().tolist() == [3]
    del tensor
    assert pool.take(2) == Run(0, 2)
    assert pool.pinned_bytes == 0
    pool.close()


def test_shrinking_gives_back_what_is_free_from_the_end() -> None:
    pool, ledger = make(16, room=16)
    runs = [Run(4 * number, 4) for number in range(4)]
    assert [pool.take(4) for _ in range(4)] == runs
    for number in (1, 3):
        pool.give_back(runs[number])
    assert pool.shrink(14 * SLOT)
    assert charged(ledger) == 14
    pool.give_back(runs[2])
    assert pool.shrink(6 * SLOT)
    assert charged(ledger) == 6
    assert not pool.shrink(SLOT)
    assert charged(ledger) == 4
    pool.close()


def test_all_in_one_is_what_there_is_room_for_at_the_first_use() -> None:
    pool, ledger = make(8, room=5, in_one=True)
    assert charged(ledger) == 0
    assert pool.take(6) is None
    assert charged(ledger) == 5
    assert pool.take(5) == Run(0, 5)
    pool.give_back(Run(0, 5))
    pool.shrink()
    assert charged(ledger) == 5
    pool.close()
    assert charged(ledger) == 0


@given(st.data())
def test_runs_never_overlap_and_the_charge_is_bounded(data: Any) -> None:
    room = 12
    pool, ledger = make(32, room)
    taken: list[Run] = []
    for _ in range(data.draw(st.integers(0, 40))):
        if taken and data.draw(st.booleans()):
            pool.give_back(taken.pop(data.draw(st.integers(0, len(taken) - 1))))
        elif data.draw(st.integers(0, 5)) == 0:
            pool.shrink(data.draw(st.integers(0, room)) * SLOT)
        else:
            slots = data.draw(st.integers(1, 6))
            run = pool.take(slots)
            used = sum(each.slots for each in taken)
            if run is None:
                assert used + slots > room
            else:
                assert run.slots == slots
                taken.append(run)
        slots_taken = [slot for r in taken for slot in range(r.first, r.first + r.slots)]
        assert len(slots_taken) == len(set(slots_taken))
        assert pool.used_bytes == len(slots_taken) * SLOT
        assert len(slots_taken) <= charged(ledger) <= room
        assert pool.charged_bytes == charged(ledger) * SLOT
    pool.close()
