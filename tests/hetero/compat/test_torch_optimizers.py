"""hetero/compat/torch_optimizers: torch's optimizers, and schedulers of theirs, over the engine."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR, StepLR

import hetero
from hetero.compat import torch_optimizers
from hetero.compat.torch_optimizers import follow, hybrid_optimizer

MAKERS: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {"lr": 1e-2}),
    ("Adam", {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.9)}),
    ("AdamW", {"lr": 1e-2}),
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.1}),
]


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def loss_of(model: torch.nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))
    return (model(x) - 1).square().mean()


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    return [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 3e-3}]


@pytest.mark.parametrize("ours", [False, True], ids=["from torch's", "by signature"])
@pytest.mark.parametrize(("name", "options"), MAKERS)
def test_updates_are_torchs(name: str, options: dict[str, Any], ours: bool) -> None:
    plain, model = net(), net()
    reference = getattr(torch.optim, name)(groups(plain), **options)
    if ours:
        optimizer = getattr(torch_optimizers, name)(groups(model), **options)
    else:
        optimizer = hybrid_optimizer(getattr(torch.optim, name)(groups(model), **options))
    hetero.initialize(model, optimizer, dtype="fp32")
    for seed in range(4):
        for each, update in ((model, optimizer), (plain, reference)):
            update.zero_grad()
            loss_of(each, seed).backward()
            update.step()
    for found, weight in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.detach(), weight.detach(), rtol=1e-5, atol=1e-6)
    optimizer.engine.close()


@pytest.mark.parametrize(
    "maker",
    [
        lambda o: StepLR(o, 1, gamma=0.5),
        lambda o: SequentialLR(o, [LinearLR(o, 0.1, 1.0, 2), CosineAnnealingLR(o, 5)], [2]),
    ],
    ids=["StepLR", "SequentialLR"],
)
def test_a_scheduler_of_torchs_optimizer_follows(maker: Any) -> None:
    plain, model = net(), net()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    source = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedulers = [maker(reference), maker(source)]
    optimizer = hybrid_optimizer(source)
    follow(schedulers[1], source, optimizer)
    hetero.initialize(model, optimizer, dtype="fp32")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(5):
            for each, update, scheduler in (
                (model, optimizer, schedulers[1]),
                (plain, reference, schedulers[0]),
            ):
                update.zero_grad()
                loss_of(each, seed).backward()
                update.step()
                scheduler.step()
            assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
    optimizer.engine.close()


def test_heteros_own_stays_as_it_is() -> None:
    optimizer = hetero.HybridLion(net().parameters())
    assert hybrid_optimizer(optimizer) is optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.RMSprop(p), "not RMSprop"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad=True is another update"),
        (lambda p: torch.optim.SGD(p, maximize=True), "maximize=True is another update"),
        (
            lambda p: torch.optim.Adagrad(p, initial_accumulator_value=1.0),
            "initial_accumulator_value must be 0",
        ),
    ],
)
def test_what_would_be_another_update_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hybrid_optimizer(make(net().parameters()))


def test_one_that_was_stepped_is_refused() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    loss_of(model, 0).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="was stepped already"):
        hybrid_optimizer(optimizer)
