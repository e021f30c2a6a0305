"""offload/memory/arena: slots, their views, their pins and what is charged for them."""

import pytest
import torch

from offload.errors import BudgetError
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account, Tier

SLOT = 8192


@pytest.fixture
def ledger():
    return Ledger({Tier.HOST: 6 * SLOT})


@pytest.fixture
def arena(ledger):
    return HostArena(4, SLOT, ledger, Account.GATHERED)


def charged(ledger: Ledger) -> int:
    return ledger.used(Tier.HOST, Account.GATHERED)


def test_views_past_the_ends_are_refused(arena):
    for slot, run in ((4, 1), (3, 2), (-1, 1), (0, 5)):
        with pytest.raises((ValueError, IndexError, TypeError)):
            arena.view(slot, run, torch.uint8)


def test_a_view_from_inference_mode_is_written_outside_of_it(arena):
    """Memory that an evaluation has begun to read into may be complete in the next forward."""
    with torch.inference_mode():
        view = arena.view(0, 1, torch.float32)
        part = view[2:4]
    part.fill_(3)
    assert view[:5].tolist() == [0, 0, 3, 3, 0]


def test_a_refused_commit_charges_nothing(arena, ledger):
    ledger.charge(Tier.HOST, Account.PARAM, 4 * SLOT)
    arena.commit(0)
    with pytest.raises(BudgetError):
        arena.commit(0, 3)
    assert charged(ledger) == SLOT
    arena.commit(3)
    assert charged(ledger) == 2 * SLOT
    arena.decommit(0, 4)  # of which two are charged
    assert (charged(ledger), arena.charged_slots) == (0, 0)


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
