"""hetero/setup/initialize.py: what is refused, and a failure at the end leaves nothing behind."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import hetero
from hetero.api.module_state_dict import StateDictHooks
from hetero.runtime.relocation import BudgetMoves
from hetero.setup import initialize as setup
from offload.errors import HeteroError, PeerError
from tests.support.training.small_net import SETTINGS, Net, Settings, assert_same, train
from tests.support.training.smallest import smallest_host_memory

pytestmark = pytest.mark.usefixtures("nothing_left")


def fail(*_: object) -> None:
    raise PeerError("rank 1 ended")


def assert_trains_as(
    expected: torch.nn.Module, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int
) -> None:
    """With Adam at this rate, the same weights as plain torch's after so many steps."""
    adam = torch.optim.AdamW(expected.parameters(), lr=1e-2, weight_decay=0.0)
    for seed in range(steps):
        train(model, optimizer, seed)
        train(expected, adam, seed)
    assert_same(model, expected)


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


class Tied(Net):
    """Its last weight is tied to the first one's memory, or to a part of one storage beside it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        if how == "data":
            self.last.weight.data = self.first.weight.data
        elif how == "overlap":
            memory = torch.randn(96, 64)
            self.first.weight.data, self.last.weight.data = memory[:64], memory[32:]
        else:
            memory = torch.randn(128, 64)
            self.first.weight.data, self.last.weight.data = memory[:64], memory[64:]


@pytest.mark.covering(2)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("in_context", [True, False])
@pytest.mark.parametrize("how", ["data", "overlap"])
def test_two_parameters_over_one_memory_are_refused(
    how: str, in_context: bool, settings: Settings, tmp_path: Path
) -> None:
    options = {**settings, "dtype": "fp32", "nvme_path": str(tmp_path), "host_memory": "1MiB"}
    with hetero.ZeroInitContext(**options) if in_context else nullcontext():
        model = Tied(how)
    optimizer = hetero.HybridAdam(model.parameters())
    with pytest.raises(HeteroError, match=r"first\.weight and last\.weight are two parameters"):
        hetero.initialize(model, optimizer, **({} if in_context else options))
    model.last.weight = model.first.weight  # what the error says
    optimizer = hetero.HybridAdam(model.parameters())
    model, optimizer = hetero.initialize(model, optimizer, **({} if in_context else options))
    train(model, optimizer)
    assert torch.equal(model.last.weight.detach(), model.first.weight.detach())
    optimizer.engine.close()


@pytest.mark.parametrize("normed", [1, 4])
def test_the_smallest_budget_has_room_for_memory_that_other_tensors_have(
    normed: int, tmp_path: Path
) -> None:
    """The older spectral_norm() has its weight twice until the first forward."""

    def plain() -> torch.nn.Sequential:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(64, 64) for _ in range(4)]
        for layer in layers[:normed]:
            torch.nn.utils.spectral_norm(layer)
        return torch.nn.Sequential(*layers)

    def build(host_memory: int) -> tuple[torch.nn.Sequential, hetero.HybridAdam]:
        model = plain()
        options = {"placement_policy": "nvme", "dtype": "fp32", "nvme_path": str(tmp_path)}
        optimizer = hetero.HybridAdam(model.parameters(), lr=1e-2)
        return hetero.initialize(model, optimizer, **options, host_memory=host_memory)

    smallest = smallest_host_memory(lambda: build(normed * 64 * 64 * 4 + 8192))
    model, optimizer = build(smallest)
    assert_trains_as(plain(), model, optimizer, steps=2)
    assert optimizer.engine.ledger.peak_bytes["host"] <= smallest
    optimizer.engine.close()


@pytest.mark.parametrize("settings", SETTINGS)
def test_parameters_beside_each_other_in_one_storage(settings: Settings, tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = Tied("beside")
    model = copy.deepcopy(expected)
    options = {**settings, "dtype": "fp32", "nvme_path": str(tmp_path), "host_memory": "1MiB"}
    model, optimizer = hetero.initialize(
        model, hetero.HybridAdam(model.parameters(), lr=1e-2), **options
    )
    assert_trains_as(expected, model, optimizer, steps=2)
    optimizer.engine.close()


@pytest.mark.parametrize("in_context", [True, False])
def test_parameters_that_are_views_of_one_tensor(in_context: bool, tmp_path: Path) -> None:
    """torch counts changes of them together, but an update of one is no change of another."""

    def plain() -> torch.nn.Sequential:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(64, 64) for _ in range(3)]
        for layer, weight in zip(layers, torch.randn(3, 64, 64) / 8, strict=True):
            layer.weight = torch.nn.Parameter(weight)
        return torch.nn.Sequential(*layers)

    options = {"placement_policy": "nvme", "dtype": "fp32", "host_memory": "160KiB"}
    options |= {"nvme_path": str(tmp_path), "chunk_numel": 4096}
    with hetero.ZeroInitContext(**options) if in_context else nullcontext():
        model = plain()
    optimizer = hetero.HybridAdam(model.parameters(), lr=1e-2)
    model, optimizer = hetero.initialize(model, optimizer, **({} if in_context else options))
    assert_trains_as(plain(), model, optimizer, steps=3)
    optimizer.engine.close()
