"""hetero/compat/optimizers: arguments of other projects' optimizers, in their order."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hetero
from hetero.compat import oneflow
from hetero.compat.colossalai.nn.optimizer import CPUAdam, HybridAdam
from hetero.compat.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from hetero.compat.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from hetero.compat.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from hetero.compat.optimizers import RenamedOptimizer, named_optimizer

BETAS = (0.9, 0.999)
RENAMED: list[Any] = [
    *(HybridAdam, CPUAdam, DeepSpeedCPUAdam, FusedAdam, DeepSpeedCPULion, FusedLion),
    *(DeepSpeedCPUAdagrad, oneflow.optim.SGD, oneflow.optim.Adam, oneflow.optim.AdamW),
]


def params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3))]


@pytest.mark.parametrize("kind", RENAMED)
def test_defaults_are_the_projects(kind: Any) -> None:
    made, groups = kind(params()), {}
    for name, parameter in list(inspect.signature(kind).parameters.items())[1:]:
        if name in made.defaults:
            assert made.defaults[name] == parameter.default
            groups[name] = parameter.default
    assert "lr" in groups


def test_defaults_of_a_named_one_are_deepspeeds() -> None:
    lion = named_optimizer("Lion", {}, params(), "fp32").defaults
    assert (lion["lr"], lion["betas"]) == (1e-3, BETAS)
    of_torch = named_optimizer("Adam", {"torch_adam": True}, params(), "bf16")
    assert (of_torch.defaults["weight_decay"], of_torch.state_dtype) == (1e-2, "bf16")


def test_arguments_by_their_order() -> None:
    adam = FusedAdam(params(), 0.1, False, (0.5, 0.6), 1e-3, False, 0.2)
    expected = {"lr": 0.1, "bias_correction": False, "betas": (0.5, 0.6), "eps": 1e-3}
    expected |= {"adamw_mode": False, "weight_decay": 0.2}
    assert {name: adam.defaults[name] for name in expected} == expected
    cpu = DeepSpeedCPUAdam(params(), 0.1, True, BETAS, 1e-3, 0.2, False, False, False)
    assert (cpu.defaults["adamw_mode"], cpu.state_dtype) == (False, "bf16")
    assert isinstance(cpu, hetero.CPUAdam)
    assert not cpu.device_updates
    lion = DeepSpeedCPULion(params(), weight_decay=0.1)
    assert (lion.defaults["betas"], lion.defaults["weight_decay"]) == (BETAS, 0.1)
    assert oneflow.optim.Adam(params()).defaults["adamw_mode"] is False
    assert isinstance(oneflow.optim.Adagrad(params()), hetero.HybridAdagrad)
    adamw = oneflow.optim.AdamW(params(), 0.1, BETAS, 1e-3, 0.2, False, False, state_dtype="bf16")
    assert (adamw.defaults["bias_correction"], adamw.state_dtype) == (False, "bf16")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"beta": 1}, r"FusedAdam\(\): got an unexpected keyword argument 'beta'"),
        ({"params": []}, "multiple values for argument 'params'"),
    ],
)
def test_arguments_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        FusedAdam(params(), **given)
    with pytest.raises(TypeError, match="missing a required argument: 'params'"):
        FusedAdam()
    with pytest.raises(ValueError, match="amsgrad=True is another update"):
        FusedAdam(params(), amsgrad=True)
    with pytest.raises(ValueError, match="maximize=True"):
        oneflow.optim.SGD(params(), maximize=True)


def test_one_that_is_not_needed_is_named(not_needed: Callable[[], list[str]]) -> None:
    FusedAdam(params())
    FusedAdam(params(), set_grad_none=True)
    assert not not_needed()
    FusedAdam(params(), set_grad_none=False)
    FusedLion(params(), set_grad_none=False)
    assert not_needed() == ["FusedAdam: set_grad_none", "FusedLion: set_grad_none"]


class Mine(FusedAdam):
    """A user's own, with arguments of its own."""

    def __init__(self, of: Any, rate: float) -> None:
        super().__init__(of, lr=rate)


def test_it_may_have_subclasses_and_copies() -> None:
    made = Mine(params(), 0.25)
    assert made.defaults["lr"] == 0.25
    assert issubclass(Mine, RenamedOptimizer)
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert type(copied) is Mine
        assert copied.param_groups[0]["lr"] == 0.25
