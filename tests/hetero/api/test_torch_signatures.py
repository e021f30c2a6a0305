"""Arguments of hetero's optimizers are torch's: the same order, names, defaults and meanings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hetero
from hetero.compat import optimizers as torch_optimizers

# Each class with torch's, and a value for each argument that is not the default.
VALUES: dict[str, Any] = {
    "lr": 0.03,
    "betas": (0.8, 0.95),
    "eps": 1e-6,
    "weight_decay": 0.2,
    "lr_decay": 0.1,
    "momentum": 0.7,
    "dampening": 0.0,
    "nesterov": True,
    "ns_coefficients": (3.0, -4.0, 2.0),
    "ns_steps": 3,
    "adjust_lr_fn": "original",
}
PEERS: list[tuple[Any, Any]] = [
    (hetero.AdamW, torch.optim.AdamW),
    (hetero.Adam, torch.optim.Adam),
    (hetero.HybridSGD, torch.optim.SGD),
    (hetero.HybridAdagrad, torch.optim.Adagrad),
    (hetero.HybridMuon, torch.optim.Muon),
    # (Adam's and Lion's own papers name no more; their defaults are ours.)
    (hetero.HybridAdam, torch.optim.AdamW),
    (hetero.CPUAdam, torch.optim.AdamW),
]
OWN_DEFAULTS = {hetero.HybridAdam: {"weight_decay"}, hetero.CPUAdam: {"weight_decay"}}
OTHER_UPDATES = {"amsgrad", "maximize", "differentiable", "initial_accumulator_value"}
NO_EFFECT = {"foreach", "fused", "capturable"}
DOORS: list[Any] = [
    torch_optimizers.Adam,
    torch_optimizers.AdamW,
    torch_optimizers.SGD,
    torch_optimizers.Adagrad,
]


def matrix() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3, 3))]


def arguments(kind: Any) -> list[inspect.Parameter]:
    """Of torch's class, without self and params."""
    return list(inspect.signature(kind).parameters.values())[1:]


def options(make: Callable[[], torch.optim.Optimizer]) -> dict[str, Any]:
    made = make()
    group = {k: v for k, v in made.param_groups[0].items() if k != "params"}
    if group.pop("decoupled_weight_decay", isinstance(made, torch.optim.AdamW)):
        group.setdefault("adamw_mode", True)
    return group


def prefixes(peer: Any) -> Iterator[list[inspect.Parameter]]:
    positional = [a for a in arguments(peer) if a.kind is a.POSITIONAL_OR_KEYWORD]
    for length in range(1, len(positional) + 1):
        yield positional[:length]


@pytest.mark.parametrize(("own", "peer"), PEERS, ids=lambda c: f"{c.__module__}.{c.__name__}")
def test_positional_arguments_are_torchs(own: Any, peer: Any) -> None:
    for prefix in prefixes(peer):
        if own in OWN_DEFAULTS and prefix[-1].name == "amsgrad":
            continue  # by its name alone
        values = [VALUES.get(a.name, a.default) for a in prefix]
        found = options(lambda v=values: own(matrix(), *v))
        expected = options(lambda v=values: peer(matrix(), *v))
        for name in expected.keys() & found.keys():
            if name not in OWN_DEFAULTS.get(own, ()) or len(prefix) >= 4:
                assert found[name] == expected[name], (name, values)


@pytest.mark.parametrize(("own", "peer"), PEERS, ids=lambda c: f"{c.__module__}.{c.__name__}")
def test_keywords_and_defaults_are_torchs(own: Any, peer: Any) -> None:
    for argument in arguments(peer):
        name = argument.name
        if name == "decoupled_weight_decay" and own is not hetero.Adam:
            continue
        own(matrix(), **{name: argument.default})
        if name in OTHER_UPDATES:
            with pytest.raises(ValueError, match=rf"{name}=.* is another update"):
                own(matrix(), **{name: True})
            with pytest.raises(ValueError, match=rf"{name}=.* is another update"):
                own([{"params": matrix(), name: True}])
        elif name in NO_EFFECT:
            made = own([{"params": matrix(), name: True}], **{name: True})
            assert name not in made.param_groups[0]
        else:
            given = {name: VALUES.get(name, True)}
            if name == "nesterov":
                given["momentum"] = 0.9
            assert (
                options(lambda g=given: own(matrix(), **g)).items()
                >= {
                    key: value
                    for key, value in options(lambda g=given: peer(matrix(), **g)).items()
                    if key not in OTHER_UPDATES | NO_EFFECT | OWN_DEFAULTS.get(own, set())
                }.items()
            )
    with pytest.raises(TypeError, match="unexpected keyword argument 'beta'"):
        own(matrix(), beta=1)


@pytest.mark.parametrize("own", DOORS)
def test_the_doors_names_are_the_same_classes(own: Any) -> None:
    assert own in (hetero.Adam, hetero.AdamW, hetero.HybridSGD, hetero.HybridAdagrad)


def test_lion_has_the_order_of_its_paper() -> None:
    group = hetero.HybridLion(matrix(), 0.03, (0.8, 0.95), 0.2).param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.03, (0.8, 0.95), 0.2)


def flags() -> Iterator[tuple[Any, str]]:
    for own in (hetero.HybridAdam, hetero.CPUAdam, hetero.Adam, hetero.AdamW):
        yield own, "bias_correction"
        yield own, "adamw_mode"
    yield hetero.HybridSGD, "nesterov"
    yield hetero.HybridMuon, "nesterov"


@pytest.mark.covering(1)
@pytest.mark.parametrize(("own", "flag"), list(flags()))
@pytest.mark.parametrize("value", [(0.9, 0.99), 1, None, "False", torch.tensor(True)])
def test_a_flag_that_is_no_bool_is_refused(own: Any, flag: str, value: object) -> None:
    message = rf"{flag} must be True or False, not "
    with pytest.raises(ValueError, match=message):
        own(matrix(), **{flag: value})
    with pytest.raises(ValueError, match=message):
        own([{"params": matrix(), flag: value}])
    made = own(matrix())
    state = made.state_dict()
    state["param_groups"][0][flag] = value
    with pytest.raises(ValueError, match=message):
        made.load_state_dict(state)


def test_flags_are_keywords() -> None:
    for own in (hetero.HybridAdam, hetero.CPUAdam):
        with pytest.raises(TypeError):
            own(matrix(), 1e-3, (0.9, 0.99), 1e-8, 0.0, True)


@pytest.mark.parametrize("name", ["foreach", "fused", "capturable"])
def test_masters_survive_a_group_that_says_how_torch_computes(name: str) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = hetero.AdamW([{"params": list(model.parameters()), name: True}], lr=1e-2)
    hetero.initialize(model, optimizer, dtype="bf16", placement_policy="cpu")
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    before = hetero.masters(model.parameters())
    assert not torch.equal(before[0], before[0].bfloat16().float())
    optimizer.load_state_dict(optimizer.state_dict())
    assert all(map(torch.equal, before, hetero.masters(model.parameters())))
    optimizer.engine.close()


def test_a_rule_that_is_set_later_is_refused_at_the_step() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = hetero.AdamW(model.parameters())
    hetero.initialize(model, optimizer, dtype="fp32", placement_policy="cpu")
    model(torch.ones(2, 4)).sum().backward()
    optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(ValueError, match="maximize=True is another update"):
        optimizer.step()
    optimizer.engine.close()
