"""offload/device: of events no more are kept than somebody may wait for."""

from __future__ import annotations

import torch

from offload.device.cuda_backend import CudaBackend
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account
from tests.support.native.fake_cuda import FakeRuntime

SLOT = 4096


def test_copies_keep_no_more_events_than_are_waited_for() -> None:
    runtime = FakeRuntime(page_lockable=False)
    backend = CudaBackend(runtime)
    arena = backend.arena(2, SLOT, Ledger({}), Account.GATHERED)
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
    runtime = FakeRuntime(page_lockable=False)
    backend = CudaBackend(runtime)
    arena = backend.arena(3, SLOT, Ledger({}), Account.PARAM)
    for _ in range(10):
        views = [arena.view(slot, 1, torch.uint8, pinned=True) for slot in range(3)]
        views.clear()
    assert len(runtime.events) <= 3
    arena.close()
    backend.close()
