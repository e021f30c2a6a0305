"""offload/memory/arena: slots, their views, their pins and what is charged for them."""

import pytest
import torch

from offload.errors import BudgetError
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account, Tier

SLOT = 8192
HUGE = 2 << 20


@pytest.fixture
def ledger():
    return Ledger({Tier.HOST: 6 * SLOT})


@pytest.fixture
def arena(ledger):
    return HostArena(4, SLOT, ledger, Account.GATHERED)


def charged(ledger: Ledger) -> int:
    return ledger.used(Tier.HOST, Account.GATHERED)


def test_slots_lie_one_after_the_other(arena):
    assert arena.memory.nbytes == 4 * SLOT
    for slot in range(4):
        assert arena.address(slot) == arena.memory.address + slot * SLOT
        assert arena.slot_of(arena.address(slot)) == slot
        assert arena.slot_of(arena.address(slot) + SLOT - 1) == slot
    assert arena.slot_of(arena.memory.address - 1) is None
    assert arena.slot_of(arena.memory.address + 4 * SLOT) is None


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("slot", "run"), [(0, 1), (1, 2), (3, 1), (0, 4)])
def test_views_are_the_slots_own_memory(arena, dtype, slot, run):
    view = arena.view(slot, run, dtype)
    assert view.dtype == dtype
    assert view.shape == (run * SLOT // dtype.itemsize,)
    assert view.data_ptr() == arena.address(slot)
    arena.view(0, 4, torch.uint8).fill_(0)
    view.view(torch.uint8).fill_(7)
    whole = arena.view(0, 4, torch.uint8).view(4, SLOT)
    inside = [s for s in range(4) if slot <= s < slot + run]
    assert [s for s in range(4) if (whole[s] == 7).all()] == inside
    assert all((whole[s] == 0).all() for s in range(4) if s not in inside)


@pytest.mark.parametrize(("slot", "run"), [(4, 1), (3, 2), (-1, 1), (0, 5)])
def test_views_past_the_ends_are_refused(arena, slot, run):
    with pytest.raises((ValueError, IndexError, TypeError)):
        arena.view(slot, run, torch.uint8)


def test_a_lease_lasts_as_long_as_any_tensor_over_it(arena):
    pin = arena.view(1, 2, torch.float32, pinned=True)
    part = pin[5:9].view(2, 2).t()
    parameter = torch.nn.Parameter(pin[:4])
    assert [arena.pins[s] for s in range(4)] == [0, 1, 0, 0]
    del pin
    assert arena.pins[1] == 1
    del part
    assert arena.pins[1] == 1
    parameter.data = torch.zeros(4)
    assert arena.pins[1] == 0


def test_a_slot_is_charged_once_when_committed(arena, ledger):
    assert charged(ledger) == 0
    arena.commit(1)
    arena.commit(1)
    assert charged(ledger) == SLOT
    arena.commit(0, 3)
    assert charged(ledger) == 3 * SLOT


def test_a_refused_commit_charges_nothing(arena, ledger):
    ledger.charge(Tier.HOST, Account.PARAM, 4 * SLOT)
    arena.commit(0)
    with pytest.raises(BudgetError):
        arena.commit(0, 3)
    assert charged(ledger) == SLOT
    arena.commit(3)
    assert charged(ledger) == 2 * SLOT


def test_close_gives_the_charge_back_once(arena, ledger):
    arena.commit(0, 2)
    arena.close()
    arena.close()
    assert charged(ledger) == 0
    assert ledger.peak_bytes["host"] == 2 * SLOT


def test_a_resized_arena_is_empty_and_charged_anew():
    ledger = Ledger({Tier.HOST: 8 * 4096})
    arena = HostArena(0, 4096, ledger, Account.PARAM)
    assert arena.slot_of(12345) is None
    assert arena.live_views() == 0
    arena.resize(3)
    arena.commit(0, 3)
    view = arena.view(1, 1, torch.uint8, pinned=True)
    view.fill_(7)
    assert ledger.in_use_bytes["host"] == 3 * 4096
    arena.resize(2, 8192)
    assert ledger.in_use_bytes["host"] == 0
    assert arena.live_views() == 0
    assert view.eq(7).all(), "who views the old memory keeps it"
    del view
    assert arena.live_views() == 0
    arena.commit(0, 2)
    assert ledger.in_use_bytes["host"] == 2 * 8192
    arena.close()
    assert ledger.in_use_bytes["host"] == 0
