"""HybridSGD beside torch.optim.SGD, bit for bit: each parameter's first update, and state dicts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

import hetero
from tests.support.training.pair import Pair
from tests.support.training.small_net import SETTINGS, Net, Settings, loss_of

pytestmark = pytest.mark.usefixtures("nothing_left")

DAMPED = {"lr": 0.05, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.01}
OPTIONS = {
    "plain": {"lr": 0.05, "weight_decay": 0.01},
    "momentum": {"lr": 0.05, "momentum": 0.9},
    "damped": DAMPED,
    "nesterov": {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
}

Prepare = Callable[[Net], list[dict[str, Any]]]


def all_in_one(model: Net) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters())}]


def pair_of(
    settings: Settings,
    path: Path,
    options: dict[str, Any],
    groups: Prepare = all_in_one,
    **more: Any,
) -> Pair:
    def make(model: Net, managed: bool) -> list[torch.optim.Optimizer]:
        return [(hetero.HybridSGD if managed else torch.optim.SGD)(groups(model), **options)]

    return Pair(Net, make, settings, path, **more)


def late_loss(model: Net, seed: int) -> torch.Tensor:
    """Of which the parameters of `unused` get gradients, too."""
    return loss_of(model, seed) + model.unused(torch.full((2, 8), 0.1 * seed)).square().mean()


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_parameter_whose_gradients_come_late(
    name: str, settings: Settings, tmp_path: Path
) -> None:
    pair = pair_of(settings, tmp_path, OPTIONS[name])
    for seed in range(1, 7):
        pair.step(seed, late_loss if seed > 3 else loss_of)
    assert pair.engine.find(pair.model.unused.weight).step == 3
    pair.close()


@pytest.mark.parametrize("settings", SETTINGS)
def test_groups_with_and_without_momentum(settings: Settings, tmp_path: Path) -> None:
    """Their parameters lie in the same chunks."""

    def groups(model: Net) -> list[dict[str, Any]]:
        weights = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim <= 1]
        return [
            {"params": rest, "momentum": 0.0},
            {"params": weights[:1]},
            {"params": weights[1:], "dampening": 0.0, "nesterov": True},
        ]

    pair = pair_of(settings, tmp_path, DAMPED, groups)
    for seed in range(4):
        pair.step(seed)
    pair.close()


def test_momentum_that_is_switched_off_and_on_keeps_its_buffer(tmp_path: Path) -> None:
    pair = pair_of({"placement_policy": "cpu"}, tmp_path, DAMPED)
    for seed, momentum in enumerate([0.9, 0.9, 0.0, 0.0, 0.8]):
        for _, (optimizer,) in pair.sides():
            optimizer.param_groups[0]["momentum"] = momentum
        pair.step(seed)
        pair.assert_same()
    pair.close()


def test_momentum_that_is_switched_on_late_begins_with_zeros(tmp_path: Path) -> None:
    """torch's begins with the gradient, without dampening."""
    pair = pair_of({"placement_policy": "cpu"}, tmp_path, DAMPED)
    for seed, momentum in enumerate([0.0, 0.0, 0.9, 0.9]):
        for _, (optimizer,) in pair.sides():
            optimizer.param_groups[0]["momentum"] = momentum
        if seed == 2:
            for param in pair.plain.parameters():
                pair.theirs[0].state[param]["momentum_buffer"] = torch.zeros_like(param)
        pair.step(seed)
        pair.assert_same()
    pair.close()


@pytest.mark.parametrize("settings", SETTINGS)
def test_parameters_that_are_unfrozen(settings: Settings, tmp_path: Path) -> None:
    def groups(model: Net) -> list[dict[str, Any]]:
        model.last.requires_grad_(False)
        return all_in_one(model)

    more = {"host_memory": "1MiB", "reserve_memory": "300KiB"}
    pair = pair_of({**settings, **more}, tmp_path, DAMPED, groups)
    for seed in range(5):
        if seed == 2:
            for model, _ in pair.sides():
                model.last.requires_grad_(True)
        pair.step(seed)
    pair.close()


def test_steps_that_a_grad_scaler_skips_are_none(tmp_path: Path) -> None:
    pair = pair_of({"placement_policy": "cpu"}, tmp_path, DAMPED, initial_loss_scale=None)
    scalers = [GradScaler("cpu", init_scale=2.0**12) for _ in range(2)]
    for seed in range(5):
        for (model, (optimizer,)), scaler in zip(pair.sides(), scalers, strict=True):
            loss = loss_of(model, seed) * (float("inf") if seed in (0, 2) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        pair.assert_same()
    assert pair.engine.find(pair.model.first.weight).step == 3
    pair.close()


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("begun", [False, True])
def test_state_goes_to_torch_and_back(begun: bool, name: str, tmp_path: Path) -> None:
    """Also of parameters that have no buffer yet, and without masters that torch did not train."""
    pair = pair_of({"placement_policy": "cpu"}, tmp_path, OPTIONS[name])
    for seed in range(2 * begun):
        pair.step(seed)
    (optimizer,) = pair.ours
    state = optimizer.state_dict()
    assert ("momentum_buffer" in state["state"][0]) == begun
    torch.manual_seed(1)
    pair.plain.load_state_dict(pair.model.state_dict())
    pair.theirs = [torch.optim.SGD(pair.plain.parameters(), lr=1.0)]
    pair.theirs[0].load_state_dict(state)
    for seed in range(2, 4):
        pair.step(seed, late_loss)
    pair.assert_same()

    for seed in range(9, 11):  # away from torch's
        loss_of(pair.model, seed).backward()
        optimizer.step()
        optimizer.zero_grad()
    pair.model.load_state_dict(pair.plain.state_dict())
    optimizer.load_state_dict(pair.theirs[0].state_dict())
    pair.assert_same()
    group = optimizer.param_groups[0]
    assert {**OPTIONS[name], "params": group["params"]}.items() <= group.items()
    for seed in range(4, 7):
        pair.step(seed, late_loss)
    pair.close()


def test_torchs_state_without_a_buffer_begins_anew(tmp_path: Path) -> None:
    pair = pair_of({"placement_policy": "cpu"}, tmp_path, DAMPED)
    pair.step(0)
    state = pair.ours[0].state_dict()
    for kept in state["state"].values():
        kept |= {"momentum_buffer": None, "step": 0}
    pair.ours[0].load_state_dict(state)
    pair.theirs[0].state.clear()
    for seed in range(1, 4):
        pair.step(seed)
    pair.close()


def test_a_state_that_is_loaded_before_initialize_is_only_looked_at() -> None:
    """And what a scheduler does to its options stays."""
    model = nn.Linear(4, 1, bias=False)
    optimizer = hetero.HybridSGD(model.parameters())
    state = {"step": 0, "momentum_buffer": torch.zeros(1, 4)}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: state}})
    assert "momentum_buffer" in optimizer.state_dict()["state"][0]
    assert "momentum_buffer" in state
    optimizer.param_groups[0]["lr"] = 0.5
    hetero.initialize(model, optimizer, placement_policy="cpu")
    assert optimizer.param_groups[0]["lr"] == 0.5
    optimizer.engine.close()
