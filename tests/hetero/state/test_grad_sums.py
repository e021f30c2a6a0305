"""hetero/state/grads.py: sums of squares are those of what is kept, and cost no pass."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch.nn import utils

import hetero
from hetero.state.grads import GradSums
from hetero.state.managed_param import ManagedParam
from offload import _native
from tests.support.grad_sums import counted_passes, fresh_sum, known_sum, with_grads
from tests.support.ranks import summed_means
from tests.support.ranks.processes import RankPool
from tests.support.training.small_net import (
    EMULATED,
    SETTINGS,
    Net,
    Settings,
    loss_of,
    managed,
    plain,
)

NAMES = [name for name, _ in Net().named_parameters()]
KINDS = [
    *SETTINGS,
    EMULATED,
    pytest.param({"placement_policy": "cpu", "grad_dtype": "fp32"}, id="cpu-fp32-gradients"),
]
DTYPES = ["fp32", "bf16"]


@pytest.mark.covering(1)
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not EMULATED])
def test_a_clipped_step_makes_no_pass_for_the_norm(
    kind: Settings, dtype: str, tmp_path: Path
) -> None:
    model, optimizer = managed(kind, tmp_path, dtype, debug={"prefetch": False})
    engine = optimizer.engine
    for _ in range(2):
        with counted_passes() as passes:
            for micro_batch in range(2):
                loss_of(model, micro_batch).backward()
            read_before = engine.traffic.disk_read
            norm = engine.grad_norm(list(model.parameters()))
            hetero.clip_grad_norm_(model.parameters(), 1e-3)
            assert engine.traffic.disk_read == read_before
            assert passes == []
        sums = [fresh_sum(engine, m) for m in with_grads(engine)]
        assert norm == math.sqrt(sum(sums))
        optimizer.step()
        optimizer.zero_grad()
    engine.close()


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_contiguous_is_summed_when_it_is_asked_for(
    kind: Settings, tmp_path: Path
) -> None:
    """Also if `.grad` was taken away while the gradient left for the file, and put back."""
    model, optimizer = managed(kind, tmp_path)
    engine = optimizer.engine
    model.first.weight.grad = torch.randn(64, 64).t()
    engine.with_grads([model.first.weight])  # takes it in
    placeholder, model.first.weight.grad = model.first.weight.grad, None
    for seed in range(2):
        for param in (model.last.weight, model.last.bias, model.scale):
            param.grad = torch.full(param.shape, 0.5 + seed)
            engine.grad_norm([param])
            param.grad = None
    model.first.weight.grad = placeholder
    [first] = with_grads(engine)
    with counted_passes() as passes:
        found = known_sum(engine, first)
        assert len(passes) <= 1
    assert found == fresh_sum(engine, first)
    engine.close()


SOME = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)
ACTIONS = st.one_of(
    st.tuples(st.just("backward"), st.integers(0, 9)),
    st.tuples(st.just("backward without sync"), st.integers(0, 9)),
    st.tuples(st.just("check"), SOME),
    st.tuples(
        st.just("clip norm"), SOME, st.sampled_from([0.01, 0.5]), st.sampled_from([2, "inf"])
    ),
    st.tuples(st.just("clip value"), SOME, st.sampled_from([1e-3, 1e-2])),
    st.tuples(st.just("multiply"), SOME, st.sampled_from([0.5, -3.0, 0.0])),
    st.tuples(st.just("write"), SOME),
    st.tuples(st.just("assign"), SOME, st.integers(0, 9)),
    st.tuples(st.just("assign transposed"), SOME, st.integers(0, 9)),
    st.tuples(st.just("assign negated lazily"), SOME, st.integers(0, 9)),
    st.tuples(st.just("clear"), SOME),
    st.tuples(st.just("zero")),
    st.tuples(st.just("move"), st.booleans()),
    st.tuples(st.just("step")),
)


def check_sums(engine: Any, names: list[str]) -> None:
    for m in with_grads(engine):
        if m.name in names:
            assert known_sum(engine, m) == fresh_sum(engine, m), m.name


def act(net: Net, optimizer: Any, action: tuple[Any, ...]) -> None:
    """On a managed net, or a plain one."""
    kind, *rest = action
    engine = getattr(optimizer, "engine", None)
    if kind.startswith("backward"):
        is_held = engine is not None and kind == "backward without sync"
        with hetero.no_sync(net) if is_held else nullcontext():
            loss_of(net, rest[0]).backward()
    elif kind == "step":
        optimizer.step()
    elif kind == "zero":
        optimizer.zero_grad(set_to_none=False)
    elif kind == "move":
        if engine is not None:  # homes move from and to DISK
            engine.set_budget(host_memory="2MiB" if rest[0] else "1MiB")
    elif kind == "check":
        if engine is not None:
            check_sums(engine, rest[0])
    else:
        params = [net.get_parameter(name) for name in rest[0]]
        tools: Any = utils if engine is None else hetero
        if kind == "clip norm":
            tools.clip_grad_norm_(params, rest[1], norm_type=float(rest[2]))
        elif kind == "clip value" and any(p.grad is not None for p in params):  # torch needs one
            tools.clip_grad_value_(params, rest[1])
        for param in params:
            act_on(param, kind, rest)
            if engine is None and param.grad is not None:
                param.grad = param.grad.resolve_neg()  # torch's clipping needs that


def act_on(param: torch.nn.Parameter, kind: str, rest: list[Any]) -> None:
    if kind == "clear":
        param.grad = None
    elif kind == "multiply" and param.grad is not None:
        param.grad.mul_(rest[1])
    elif kind == "write" and param.grad is not None:
        param.grad.add_(0.25)
    elif kind.startswith("assign"):
        generator = torch.Generator().manual_seed(rest[1])
        grad = torch.randn(param.shape, generator=generator).to(param.dtype) / 50
        if kind == "assign transposed" and grad.dim() == 2:
            grad = grad.t().contiguous().t()
        elif kind == "assign negated lazily":
            grad = torch._neg_view(grad)
        param.grad = grad


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *(pytest.param(*kind.values, "fp32", id=str(kind.id)) for kind in KINDS[:3]),
        *(pytest.param(*kind.values, "bf16", id=f"{kind.id}-bf16") for kind in KINDS[1:]),
    ],
)
@given(actions=st.lists(ACTIONS, min_size=2, max_size=12))
@hypothesis_settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whatever_is_done_to_gradients(
    kind: Settings, dtype: str, tmp_path: Path, actions: list[tuple[Any, ...]]
) -> None:
    """Sums are those of what is kept; in fp32 gradients equal plain torch's."""
    if dtype == "bf16" and "backend" in kind:
        kind = kind | {"host_memory": "128KiB"}
    model, optimizer = managed(kind, tmp_path, dtype)
    expected, adam = plain()
    try:
        for action in actions:
            act(model, optimizer, action)
            if dtype == "fp32":
                act(expected, adam, action)
        check_sums(optimizer.engine, NAMES)
        if dtype == "fp32":
            grads = zip(NAMES, hetero.grads(model.parameters()), strict=True)
            for name, grad in grads:
                theirs = expected.get_parameter(name).grad
                assert (grad is None) == (theirs is None), name
                if grad is not None:
                    torch.testing.assert_close(grad, theirs, rtol=1e-3, atol=1e-6)
    finally:
        optimizer.engine.close()


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("accumulate", "sync_each"), [(1, True), (2, True), (2, False)])
@pytest.mark.parametrize(
    "dtypes", [{}, {"dtype": "bf16"}, {"dtype": "bf16", "grad_dtype": "fp32"}], ids=str
)
def test_two_ranks_make_no_pass_for_the_norm(
    ranks2: RankPool, dtypes: dict[str, Any], accumulate: int, sync_each: bool, stage: int
) -> None:
    options = {"zero_stage": stage, "chunk_numel": 20480, **dtypes}
    for found in ranks2.run(summed_means.clipped_steps, options, accumulate, sync_each):
        assert found["summed"] > 0
        assert found["wrong"] == []
        assert found["passes"] == []


class Seen(torch.Tensor):
    """A subclass, whose values may be somewhere else than its memory."""


@pytest.mark.covering(1)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("plain", lambda grad: grad),
        ("double", lambda grad: grad.double()),
        ("transposed", lambda grad: grad.t().contiguous().t()),
        ("negated lazily", torch._neg_view),
        ("zeros without memory", lambda grad: torch._efficientzerotensor(grad.shape)),
        ("subclass", lambda grad: grad.as_subclass(Seen)),
        ("broadcast", lambda grad: grad[:1]),
    ],
)
def test_every_gradient_is_written_as_torch_does(what: str, change: Any, accumulate: bool) -> None:
    managed = object.__new__(ManagedParam)
    sums = GradSums("fp32")
    grad, kept = change(torch.randn(40, 50)), torch.randn(40, 50)
    expected = kept.clone()
    expected = expected.add_(grad) if accumulate else expected.copy_(grad)
    sums[managed] = 1.0
    sums.put(managed, grad, kept, accumulate)
    assert kept.equal(expected)
    assert (managed in sums) == (what == "plain")
    if managed in sums:
        assert sums[managed] == _native.sum_of_squares("fp32", kept.data_ptr(), kept.numel())
