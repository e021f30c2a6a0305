"""hetero/runtime/relocation: what a step had beside model state at its peak."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hetero.runtime.relocation import BesideMemory
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account, Tier


@pytest.mark.parametrize(("kind", "beside"), [("cuda", 70), ("emulated", 50)])
def test_a_new_peak_is_seen_with_what_was_charged_since(
    monkeypatch: pytest.MonkeyPatch, kind: str, beside: int
) -> None:
    """What was charged before says nothing of it; an emulated DEVICE is RAM."""
    peak = 0
    monkeypatch.setattr("hetero.runtime.relocation.peak_resident_bytes", lambda: peak)
    ledger = Ledger({})
    backend: Any = SimpleNamespace(kind=kind)
    ledger.charge(Tier.HOST, Account.INIT, 1000)
    ledger.release(Tier.HOST, Account.INIT, 1000)
    memory = BesideMemory(ledger, backend)
    ledger.charge(Tier.HOST, Account.PARAM, 30)
    ledger.charge(Tier.DEVICE, Account.PARAM, 20)
    ledger.release(Tier.HOST, Account.PARAM, 30)
    peak = 100
    assert memory.new_peak() == (100, beside)
    assert memory.new_peak() == (0, 0)
