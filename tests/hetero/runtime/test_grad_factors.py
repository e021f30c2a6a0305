"""hetero/runtime/step: norms, factors, values, against torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
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


RUNS: dict[str, Run] = {
    "all": lambda net, norm, value: norm(every(net), 0.1),
    "generator": lambda net, norm, value: norm(net.parameters(), 0.1),
    "one parameter": lambda net, norm, value: norm(net.first.weight, 0.01),
    "infinity norm": lambda net, norm, value: norm(every(net), 0.01, norm_type=math.inf),
    "without gradients": lambda net, norm, value: norm(net.unused.parameters(), 0.1),
    "disjoint": lambda net, norm, value: [
        norm(net.first.parameters(), 0.02),
        norm(net.last.parameters(), 0.05),
    ],
    "overlapping": lambda net, norm, value: [
        norm(every(net), 0.5),
        norm(net.last.parameters(), 0.05),
        norm([net.last.weight, net.first.bias], 0.01),
    ],
    "values": lambda net, norm, value: value(every(net), 1e-3),
    "values of some": lambda net, norm, value: value([net.scale, net.last.bias], 1e-3),
    "norm, then values": lambda net, norm, value: [norm(every(net), 0.1), value(every(net), 1e-3)],
    "values, then norm": lambda net, norm, value: [value(every(net), 1e-2), norm(every(net), 0.1)],
}


def torch_norm(params: object, *args: object, **kwargs: object) -> torch.Tensor:
    return utils.clip_grad_norm_(params, *args, foreach=False, **kwargs)


def torch_norm_foreach(params: object, *args: object, **kwargs: object) -> torch.Tensor:
    return utils.clip_grad_norm_(params, *args, foreach=True, **kwargs)


def torch_value_foreach(params: object, value: float) -> None:
    utils.clip_grad_value_(params, value, foreach=True)


TOOLS = {
    "hetero": (hetero.clip_grad_norm_, hetero.clip_grad_value_),
    "torch": (torch_norm, utils.clip_grad_value_),
    "torch, foreach": (torch_norm_foreach, torch_value_foreach),
}


@pytest.mark.parametrize("tools", TOOLS)
@pytest.mark.parametrize("run", RUNS)
def test_clipping_equals_plain_torch(
    run: str, tools: str, settings: Settings, tmp_path: Path
) -> None:
    model, optimizer = managed(settings, tmp_path)
    expected, adam = plain()
    for seed in range(3):
        results = []
        for each, (norm, value) in (
            (model, TOOLS[tools]),
            (expected, (utils.clip_grad_norm_, utils.clip_grad_value_)),
        ):
            loss_of(each, seed).backward()
            loss_of(each, seed + 10).backward()
            results.append(RUNS[run](each, norm, value))
            if seed == 1:  # twice
                RUNS[run](each, norm, value)
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
        for grad, param in zip(
            hetero.grads(model.parameters()), expected.parameters(), strict=True
        ):
            torch.testing.assert_close(grad, param.grad, rtol=1e-5, atol=1e-7)
        for each in (optimizer, adam):
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
    hetero.clip_grad_value_(model.parameters(), 2.0**-10)
    for old, new in zip(before, hetero.grads(model.parameters()), strict=True):
        assert (old is None) == (new is None)
        if old is not None:
            assert torch.equal(new, old.clamp(-(2.0**-10), 2.0**-10))
            assert not torch.equal(new, old)
    optimizer.engine.close()


def test_clamping_beyond_the_range_of_fp16_changes_nothing(
    settings: Settings, tmp_path: Path
) -> None:
    model, optimizer = managed(settings, tmp_path, "fp16")
    optimizer.backward(loss_of(model))
    before = hetero.grads(model.parameters())
    hetero.clip_grad_value_(model.parameters(), 1e6)
    for old, new in zip(before, hetero.grads(model.parameters()), strict=True):
        assert new is None if old is None else torch.equal(old, new)
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


def test_sums_are_taken_anew_after_values_change(settings: Settings, tmp_path: Path) -> None:
    """Also of DISK-homed gradients, whose sums were taken when they left."""
    model, optimizer = managed(settings, tmp_path)
    loss_of(model).backward()
    params = list(model.parameters())
    first = optimizer.engine.grad_norm(params)
    hetero.clip_grad_value_(params, 1e-4)
    second = optimizer.engine.grad_norm(params)
    total = sum(float(g.double().square().sum()) for g in hetero.grads(params) if g is not None)
    assert second == pytest.approx(math.sqrt(total), rel=1e-6)
    assert second < first
    optimizer.engine.close()


NAMES = [name for name, _ in Net().named_parameters()]
SOME = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)
ACTIONS = st.one_of(
    st.tuples(st.just("backward"), st.integers(0, 9)),
    st.tuples(
        st.just("clip norm"), SOME, st.sampled_from([0.01, 0.5]), st.sampled_from([2, "inf"])
    ),
    st.tuples(st.just("clip value"), SOME, st.sampled_from([1e-3, 1e-2])),
    st.tuples(st.just("multiply"), SOME, st.sampled_from([0.5, -3.0])),
    st.tuples(st.just("assign"), SOME, st.integers(0, 9)),
    st.tuples(st.just("clear"), SOME),
    st.tuples(st.just("step")),
)


def act(net: Net, optimizer: torch.optim.Optimizer, action: tuple) -> None:
    kind, *rest = action
    if kind == "backward":
        loss_of(net, rest[0]).backward()
        return
    if kind == "step":
        optimizer.step()
        return
    params = [net.get_parameter(name) for name in rest[0]]
    if kind == "clip norm":
        utils.clip_grad_norm_(params, rest[1], norm_type=float(rest[2]))
    elif kind == "clip value" and any(p.grad is not None for p in params):  # torch needs one
        utils.clip_grad_value_(params, rest[1])
    for param in params:
        if kind == "multiply" and param.grad is not None:
            param.grad.mul_(rest[1])
        elif kind == "assign":
            generator = torch.Generator().manual_seed(rest[1])
            param.grad = torch.randn(param.shape, generator=generator) / 50
        elif kind == "clear":
            param.grad = None


@given(st.lists(ACTIONS, min_size=2, max_size=10))
@hypothesis_settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whatever_is_done_to_gradients_they_equal_plain_torchs(
    settings: Settings, tmp_path: Path, actions: list[tuple]
) -> None:
    model, optimizer = managed(settings, tmp_path)
    expected, adam = plain()
    try:
        for action in actions:
            act(model, optimizer, action)
            act(expected, adam, action)
        for name, grad in zip(NAMES, hetero.grads(model.parameters()), strict=True):
            theirs = expected.get_parameter(name).grad
            assert (grad is None) == (theirs is None), name
            if grad is not None:
                torch.testing.assert_close(grad, theirs, rtol=1e-3, atol=1e-6)
    finally:
        optimizer.engine.close()
