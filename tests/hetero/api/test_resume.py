"""A model's and an optimizer's state dicts: training goes on from them, in either order."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from tests.support.training.small_net import SETTINGS, Net, Settings, loss_of

pytestmark = pytest.mark.usefixtures("nothing_left")

OPTIMIZERS = {
    "adam": hetero.HybridAdam,
    "lion": hetero.HybridLion,
    "adagrad": hetero.HybridAdagrad,
    "sgd": partial(hetero.HybridSGD, momentum=0.9, dampening=0.5),
}


def build(
    rule: str, dtype: str, settings: Settings, path: Path, seed: int = 0
) -> tuple[nn.Module, hetero.HybridOptimizer]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = OPTIMIZERS[rule](model.parameters(), lr=1e-3, weight_decay=0.1)
    more = {**settings, "host_memory": "1MiB", "initial_loss_scale": 256.0}
    return hetero.initialize(
        model, optimizer, dtype=dtype, nvme_path=str(path), chunk_numel=4096, **more
    )


def steps(model: nn.Module, optimizer: hetero.HybridOptimizer, seeds: range) -> None:
    for seed in seeds:
        optimizer.backward(loss_of(model, seed))
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module, optimizer: hetero.HybridOptimizer) -> list[torch.Tensor]:
    """Parameters, masters and states."""
    states = optimizer.state_dict()["state"].values()
    return [
        *(value.clone() for value in model.state_dict().values()),
        *hetero.masters(model.parameters()),
        *(value for state in states for value in state.values()),
    ]


@pytest.mark.covering(2)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("rule", OPTIMIZERS)
@pytest.mark.parametrize("model_first", [True, False])
def test_either_order_resumes_bit_for_bit(
    model_first: bool, rule: str, dtype: str, settings: Settings, tmp_path: Path
) -> None:
    model, optimizer = build(rule, dtype, settings, tmp_path)
    steps(model, optimizer, range(3))
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    saved_optimizer = optimizer.state_dict()
    stored = whole(model, optimizer)
    steps(model, optimizer, range(3, 5))
    expected = whole(model, optimizer)
    optimizer.engine.close()

    other, other_optimizer = build(rule, dtype, settings, tmp_path, seed=7)
    steps(other, other_optimizer, range(9, 10))
    if model_first:
        other.load_state_dict(saved)
    other_optimizer.load_state_dict(saved_optimizer)
    if not model_first:
        other.load_state_dict(saved)
    assert all(map(torch.equal, whole(other, other_optimizer), stored))
    steps(other, other_optimizer, range(3, 5))
    assert all(map(torch.equal, whole(other, other_optimizer), expected))
    other_optimizer.engine.close()


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_masters_stay_only_where_the_compute_dtype_says_the_same(
    rule: str, dtype: str, settings: Settings, tmp_path: Path
) -> None:
    """A value of fp32 is meant as it is, also where the master rounds to it."""
    model, optimizer = build(rule, dtype, settings, tmp_path)
    steps(model, optimizer, range(2))
    weight = model.first.weight
    (before,) = hetero.masters([weight])
    rounded = model.state_dict()["first.weight"].clone()
    assert not torch.equal(before, rounded.float())

    loaded = rounded.clone()
    loaded[3] = 0.25
    model.load_state_dict({"first.weight": loaded}, strict=False)
    expected = before.clone()
    expected[3] = 0.25
    assert torch.equal(hetero.masters([weight])[0], expected)
    for value in (rounded.float(), before, before.double(), torch.zeros(64, 1).expand(64, 64)):
        model.load_state_dict({"first.weight": value}, strict=False)
        assert torch.equal(hetero.masters([weight])[0], value.float())
    optimizer.engine.close()


def test_what_is_no_tensor_is_left_to_torch(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"placement_policy": "cpu"}
    model, optimizer = build("adam", "bf16", settings, tmp_path)
    before = hetero.masters(model.parameters())
    with pytest.raises(RuntimeError, match="expected torch.Tensor"):
        model.load_state_dict({"first.weight": "text"}, strict=False)
    assert all(map(torch.equal, before, hetero.masters(model.parameters())))
    optimizer.engine.close()
