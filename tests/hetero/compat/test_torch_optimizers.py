"""hetero/compat/optimizers: torch's optimizers, and schedulers of theirs, over the engine."""

from __future__ import annotations

import operator
import warnings
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR, StepLR

import hetero
from hetero.compat import deepspeed
from hetero.compat.colossalai.booster import Booster
from hetero.compat.colossalai.booster.plugin import GeminiPlugin
from hetero.compat.colossalai.zero import (
    GeminiDDP,
    GeminiOptimizer,
    ShardedModelV2,
    ShardedOptimizerV2,
)
from hetero.compat.optimizers import hybrid_optimizer

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


SCHEDULERS: list[Any] = [
    lambda o: StepLR(o, 1, gamma=0.5),
    lambda o: SequentialLR(o, [LinearLR(o, 0.1, 1.0, 2), CosineAnnealingLR(o, 5)], [2]),
]


@pytest.mark.parametrize(("name", "options"), MAKERS)
def test_groups_and_states_go_through_the_loops_own_object(
    name: str, options: dict[str, Any]
) -> None:
    model = net()
    for param in model[2].parameters():
        param.requires_grad_(False)
    source = getattr(torch.optim, name)(model[0].parameters(), **options)
    hetero.initialize(model, hybrid_optimizer(source), dtype="bf16", reserve_memory="64KiB")
    for param in model[2].parameters():
        param.requires_grad_(True)
    source.add_param_group({"params": list(model[2].parameters()), "lr": 0.5})
    for option, value in options.items():  # the defaults are the loop's, too
        if option != "lr":
            assert source.param_groups[1][option] == value
    x = torch.ones(3, 8, dtype=torch.bfloat16)
    model(x).float().square().mean().backward()
    source.step()
    before, saved = hetero.masters(model.parameters()), source.state_dict()
    source.load_state_dict(saved)
    assert all(map(torch.equal, before, hetero.masters(model.parameters())))
    assert saved["param_groups"][1]["lr"] == 0.5


def test_hooks_stay() -> None:
    model, called = net(), []
    source = torch.optim.SGD(model.parameters(), lr=0.1)
    source.register_step_post_hook(lambda *_: called.append(1))
    hetero.initialize(model, hybrid_optimizer(source), dtype="fp32")
    loss_of(model, 0).backward()
    source.step()
    assert called == [1]


def by_hetero(model: Any, source: Any) -> tuple[Any, Any, Any]:
    optimizer = hybrid_optimizer(source)
    assert optimizer is source
    hetero.initialize(model, optimizer, dtype="fp32", placement_policy="cpu")
    return model, optimizer, optimizer


def by_deepspeed(model: Any, source: Any) -> tuple[Any, Any, Any]:
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, optimizer=source, config={"train_batch_size": 1, "gradient_clipping": 0.0}
    )
    return engine, engine, optimizer


def by_gemini(model: Any, source: Any) -> tuple[Any, Any, Any]:
    wrapped = GeminiDDP(model, placement_policy="auto", mixed_precision=torch.float32)
    optimizer = GeminiOptimizer(source, wrapped)
    return wrapped, optimizer, optimizer


def by_booster(model: Any, source: Any) -> tuple[Any, Any, Any]:
    plugin = GeminiPlugin(precision="fp32", placement_policy="auto")
    wrapped, optimizer, *_ = Booster(plugin=plugin).boost(model, source)
    return wrapped, optimizer, optimizer


def by_sharded_model(model: Any, source: Any) -> tuple[Any, Any, Any]:
    wrapped = ShardedModelV2(model, tensor_placement_policy="auto", dtype="fp32")
    optimizer = ShardedOptimizerV2(wrapped, source)
    return wrapped, optimizer, optimizer


@pytest.mark.covering(1)
@pytest.mark.parametrize("door", [by_hetero, by_deepspeed, by_gemini, by_booster, by_sharded_model])
@pytest.mark.parametrize(("name", "options"), MAKERS)
@pytest.mark.parametrize("make_scheduler", SCHEDULERS, ids=["StepLR", "SequentialLR"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_every_door_steps_by_the_loops_own_object(
    door: Any, name: str, options: dict[str, Any], make_scheduler: Any, when: str
) -> None:
    """A loop that keeps torch's optimizer, its groups and a scheduler of it trains as torch."""
    plain, model = net(), net()
    reference = getattr(torch.optim, name)(groups(plain), **options)
    source = getattr(torch.optim, name)(groups(model), **options)
    kept = list(source.param_groups)
    reference_scheduler = make_scheduler(reference)
    scheduler = make_scheduler(source) if when == "before" else None
    wrapped, stepped, optimizer = door(model, source)
    assert all(map(operator.is_, kept, source.param_groups))
    scheduler = scheduler or make_scheduler(source)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(4):
            if seed == 2:
                kept[1]["lr"] *= 3
                reference.param_groups[1]["lr"] *= 3
            stepped.backward(loss_of(wrapped, seed))
            if door is not by_hetero:
                with pytest.raises(hetero.HeteroError, match="leave out what its wrapper does"):
                    source.step()
            loss_of(plain, seed).backward()
            for update in (stepped, reference):
                update.step()
                update.zero_grad()
            for schedule in (scheduler, reference_scheduler):
                schedule.step()
            for found, group in zip(optimizer.param_groups, reference.param_groups, strict=True):
                assert found["lr"] == group["lr"]
            for found, weight in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(found.detach(), weight.detach(), rtol=1e-5, atol=1e-6)
    source.param_groups[0]["lr"] = 0.0
    before = [param.detach().clone() for param in model[0].parameters()]
    stepped.backward(loss_of(wrapped, 9))
    stepped.step()
    assert all(map(torch.equal, before, (p.detach() for p in model[0].parameters())))


def test_heteros_own_stays_as_it_is() -> None:
    optimizer = hetero.HybridLion(net().parameters())
    assert hybrid_optimizer(optimizer) is optimizer


def with_another_step(params: Any) -> torch.optim.Optimizer:
    optimizer: Any = torch.optim.SGD(params)
    optimizer.step = lambda: None
    return optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.RMSprop(p), "not RMSprop"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad=True is another update"),
        (lambda p: torch.optim.SGD(p, maximize=True), "maximize=True is another update"),
        (
            lambda p: torch.optim.Adagrad(p, initial_accumulator_value=1.0),
            "initial_accumulator_value=1.0 is another update",
        ),
        (lambda p: torch.optim.AdamW([{"params": p, "maximize": True}]), "maximize=True is"),
        (with_another_step, r"step\(\) of this SGD was replaced"),
    ],
)
def test_what_would_be_another_update_is_refused(make: Any, message: str) -> None:
    optimizer = make(net().parameters())
    kind, before = type(optimizer), repr(optimizer)
    with pytest.raises(ValueError, match=message):
        hybrid_optimizer(optimizer)
    assert type(optimizer) is kind
    assert repr(optimizer) == before


def test_one_that_was_stepped_is_refused() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, 0).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="was stepped already"):
        hybrid_optimizer(optimizer)
