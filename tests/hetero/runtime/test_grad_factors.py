"""hetero/runtime/step: norms, factors, values, against torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.nn import utils

import hetero
from tests.support.training.small_net import (
    SETTINGS,
    Net,
    Settings,
    assert_same,
    loss_of,
    managed,
    plain,
)

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.covering(1),
    pytest.mark.parametrize("settings", SETTINGS),
]

Clip = Callable[..., object]
Run = Callable[[Net, Clip, Clip], object]


def every(net: Net) -> list[torch.nn.Parameter]:
    return list(net.parameters())


RUNS: list[Run] = [
    lambda net, norm, value: norm(net.parameters(), 0.1),
    lambda net, norm, value: norm(net.first.weight, 0.01),
    lambda net, norm, value: norm(every(net), 0.01, norm_type=math.inf),
    lambda net, norm, value: norm(net.unused.parameters(), 0.1),  # without gradients
    lambda net, norm, value: [
        norm(every(net), 0.5),
        norm(net.last.parameters(), 0.05),
        norm([net.last.weight, net.first.bias], 0.01),
    ],
    lambda net, norm, value: value([net.scale, net.last.bias], 1e-3),
    lambda net, norm, value: [norm(every(net), 0.1), value(every(net), 1e-3)],
    lambda net, norm, value: [value(every(net), 1e-2), norm(every(net), 0.1)],
]


def torch_norm(params: object, *args: object, **kwargs: object) -> torch.Tensor:
    return utils.clip_grad_norm_(params, *args, foreach=False, **kwargs)


def torch_norm_foreach(params: object, *args: object, **kwargs: object) -> torch.Tensor:
    return utils.clip_grad_norm_(params, *args, foreach=True, **kwargs)


def torch_value_foreach(params: object, value: float) -> None:
    utils.clip_grad_value_(params, value, foreach=True)


TOOLS: list[tuple[Clip, Clip]] = [
    (hetero.clip_grad_norm_, hetero.clip_grad_value_),
    (torch_norm, utils.clip_grad_value_),
    (torch_norm_foreach, torch_value_foreach),
]


def test_clipping_equals_plain_torch(settings: Settings, tmp_path: Path) -> None:
    """Once, and twice; a step follows the last tool's."""
    model, optimizer = managed(settings, tmp_path)
    expected, adam = plain()
    for seed, (run, tools) in enumerate(product(RUNS, TOOLS)):
        results = []
        for each, (norm, value) in (
            (model, tools),
            (expected, (utils.clip_grad_norm_, utils.clip_grad_value_)),
        ):
            loss_of(each, seed).backward()
            loss_of(each, seed + 100).backward()
            results.append(run(each, norm, value))
            if seed % 2:
                run(each, norm, value)
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
        grads = hetero.grads(model.parameters())
        for grad, param in zip(grads, expected.parameters(), strict=True):
            torch.testing.assert_close(grad, param.grad, rtol=1e-5, atol=1e-7)
        for each in (optimizer, adam):
            if tools is TOOLS[-1]:
                each.step()
            each.zero_grad()
        assert_same(model, expected)
    optimizer.engine.close()


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_values_are_clamped_to_the_bit_in_the_grad_dtype(
    dtype: str, settings: Settings, tmp_path: Path
) -> None:
    model, optimizer = managed(settings, tmp_path, dtype, initial_loss_scale=256.0)
    optimizer.backward(loss_of(model))
    before = [None if g is None else g.clone() for g in hetero.grads(model.parameters())]
    hetero.clip_grad_value_(model.parameters(), 1e6)  # beyond the range of fp16: changes nothing
    hetero.clip_grad_value_(model.parameters(), 2.0**-10)
    for old, new in zip(before, hetero.grads(model.parameters()), strict=True):
        assert (old is None) == (new is None)
        if old is not None:
            assert torch.equal(new, old.clamp(-(2.0**-10), 2.0**-10))
            assert not torch.equal(new, old)
    optimizer.engine.close()


def test_clamping_does_not_hide_an_overflow_from_the_loss_scale(
    settings: Settings, tmp_path: Path
) -> None:
    model, optimizer = managed(settings, tmp_path, "fp16", initial_loss_scale=256.0)
    before = hetero.masters(model.parameters())
    # Infinite, not NaN, which clamping would leave.
    model.scale.register_hook(lambda grad: torch.full_like(grad, math.inf))
    optimizer.backward(loss_of(model))
    hetero.clip_grad_value_(model.parameters(), 0.1)
    optimizer.step()
    assert optimizer.engine.shared.loss_scale.skipped_steps == 1
    assert all(map(torch.equal, before, hetero.masters(model.parameters())))
    optimizer.engine.close()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_largest_magnitude_is_exact(dtype: str, settings: Settings, tmp_path: Path) -> None:
    model, optimizer = managed(settings, tmp_path, dtype, initial_loss_scale=256.0)
    optimizer.backward(loss_of(model))
    largest = max(g.abs().max() for g in hetero.grads(model.parameters()) if g is not None)
    norm = hetero.clip_grad_norm_(model.parameters(), 1e-3, norm_type=math.inf)
    assert norm == largest
    after = max(g.abs().max() for g in hetero.grads(model.parameters()) if g is not None)
    torch.testing.assert_close(after, torch.tensor(1e-3), rtol=1e-3, atol=0)
    optimizer.engine.close()


@pytest.mark.covering(2)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_norms_that_are_not_finite(
    bad: float, norm_type: float, settings: Settings, tmp_path: Path
) -> None:
    model, optimizer = managed(settings, tmp_path)
    params = list(model.parameters())
    before = hetero.masters(params)
    loss_of(model).backward()
    poisoned = torch.ones(64)
    poisoned[3] = bad
    model.last.bias.grad = poisoned
    with pytest.raises(hetero.NonFiniteError, match="the gradient norm is"):
        hetero.clip_grad_norm_(params, 1.0, norm_type, error_if_nonfinite=True)
    with pytest.raises(RuntimeError, match="non-finite"):
        utils.clip_grad_norm_(params, 1.0, norm_type, error_if_nonfinite=True)
    assert torch.equal(hetero.grads(model.last.bias)[0].isfinite(), poisoned.isfinite())
    norm = hetero.clip_grad_norm_(params, 1.0, norm_type)
    torch.testing.assert_close(norm, torch.tensor(bad), equal_nan=True)
    if math.isnan(bad):
        with pytest.raises(hetero.NonFiniteError, match="is multiplied by nan.*zero_grad"):
            optimizer.step()
        assert all(map(torch.equal, before, hetero.masters(params)))
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()
    expected, adam = plain()
    loss_of(expected).backward()
    adam.step()
    assert_same(model, expected)
    optimizer.engine.close()


def test_what_is_refused(settings: Settings, tmp_path: Path) -> None:
    model, optimizer = managed(settings, tmp_path)
    loss_of(model).backward()
    with pytest.raises(ValueError, match="norm_type must be 2 or inf, not 1"):
        hetero.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)
    with pytest.raises(ValueError, match="max_norm must be positive, not 0"):
        hetero.clip_grad_norm_(model.parameters(), 0)
    with pytest.raises(ValueError, match="clip_value must be 0 or more, not -1"):
        hetero.clip_grad_value_(model.parameters(), -1)
    optimizer.engine.close()
