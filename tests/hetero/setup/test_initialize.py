"""hetero/setup/initialize.py: a failure at the very end leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

import hetero
from hetero.api.module_state_dict import StateDictHooks
from hetero.runtime.relocation.budget_moves import BudgetMoves
from hetero.setup import initialize as setup
from offload.errors import HeteroError, PeerError
from tests.support.training.small_net import SETTINGS, Net

pytestmark = pytest.mark.usefixtures("nothing_left")


def fail(*_: object) -> None:
    raise PeerError("rank 1 ended")


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("where", ["limits", "state_dict hooks"])
def test_an_engine_that_cannot_be_made_gives_everything_back(
    where: str, settings: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file, threads, memory and hooks; state has moved by then, so the model is done for."""
    ledgers = []
    make_group = setup.build_chunk_group

    def build_chunk_group(*given: object) -> object:
        ledgers.append(given[3].ledger)  # type: ignore[attr-defined]
        return make_group(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(setup, "build_chunk_group", build_chunk_group)
    if where == "limits":
        monkeypatch.setattr(BudgetMoves, "_make_limits", fail)
    else:
        monkeypatch.setattr(StateDictHooks, "__init__", fail)
    model = Net()
    optimizer = hetero.HybridAdam(model.parameters())
    options = {"dtype": "fp32", "nvme_path": str(tmp_path), "chunk_numel": 4096, **settings}
    with pytest.raises(PeerError, match="rank 1 ended"):
        hetero.initialize(model, optimizer, **options)
    assert sum(ledgers[0].in_use_bytes.values()) == 0
    if where == "limits":
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(HeteroError, match="belongs to another engine"):
        hetero.initialize(model, optimizer, **options)
    for param in model.parameters():
        with pytest.raises(hetero.ClosedError):
            param.sum()
