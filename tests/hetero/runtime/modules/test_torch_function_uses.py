"""Parameters used outside of their modules (torch_function_uses): nothing stays in use.

tests/support/compatibility compares many more uses with plain PyTorch, each on a model of its own.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import utils

from tests.support.training.small_net import (
    EMULATED,
    SETTINGS,
    Net,
    Settings,
    assert_nothing_is_used,
    assert_same,
    loss_of,
    managed,
    plain,
    train,
    without_grad,
)

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.parametrize("settings", [*SETTINGS, EMULATED]),
]

READS: dict[str, Callable[[Net], object]] = {
    "sum": lambda m: [p.sum() for p in m.parameters()],
    "float": lambda m: float(m.scale),
    "mean of .data": lambda m: [p.data.mean() for p in m.parameters()],
    "foreach norm": lambda m: torch._foreach_norm(list(m.parameters())),
    "parameters_to_vector": lambda m: utils.parameters_to_vector(m.parameters()).detach(),
    "vector without grad": lambda m: without_grad(utils.parameters_to_vector, m.parameters()),
    "numpy": lambda m: torch.from_numpy(np.array(m.last.weight.detach())),
    "numpy of data": lambda m: torch.from_numpy(m.last.weight.data.numpy().copy()),
    "list of rows": lambda m: [row.sum() for row in m.last.weight],
    "rows without grad": lambda m: without_grad(lambda: [r.sum() for r in m.last.weight]),
    "a part": lambda m: m.last.weight[3:5, ::2].clone().detach(),
    "by lists": lambda m: m.last.weight.data[[3, 4], [1, 2]],
    "by a mask": lambda m: m.last.weight.data[m.last.weight.data > 0].sum(),
    "all twice": lambda m: torch.cat([m.first.weight, m.last.weight] * 3).detach(),
    "matmul": lambda m: (m.first.weight @ m.last.weight).detach(),
    "linear of data": lambda m: nn.functional.linear(torch.ones(2, 64), m.last.weight.data),
    "pickled data": lambda m: pickle.loads(pickle.dumps(m.last.weight.data)),
    "saved": lambda m: saved(m.last.weight),
    "deepcopy of two": lambda m: copy.deepcopy([m.last.weight, m.last.weight]),
    "type of it": lambda m: type(m.last.weight)(m.last.weight.data.clone()),
    "histogram": lambda m: torch.histc(m.last.weight.detach(), 7),
    "any nan": lambda m: [bool(torch.isnan(p).any()) for p in m.parameters()],
    "svd": lambda m: torch.linalg.svdvals(m.first.weight.detach()),
    "functional_call": lambda m: torch.func.functional_call(
        m, {n: p.detach() * 2 for n, p in m.named_parameters()}, torch.ones(2, 64)
    ).detach(),
    "state with variables": lambda m: m.state_dict(keep_vars=True)["last.bias"].sum(),
}


def saved(tensor: torch.Tensor) -> object:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    assert buffer.tell() < 20_000
    buffer.seek(0)
    return torch.load(buffer)


def test_reads(settings: Settings, tmp_path: Path) -> None:
    model, optimizer = managed(settings, tmp_path)
    expected, adam = plain()
    train(model, optimizer)
    train(expected, adam)
    for name, read in READS.items():
        torch.testing.assert_close(
            read(model), read(expected), rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert_nothing_is_used(optimizer)
    train(model, optimizer)
    train(expected, adam)
    assert_same(model, expected)
    optimizer.engine.close()


def squares(model: Net) -> torch.Tensor:
    return sum(p.pow(2).sum() for p in model.parameters())


PENALTIES: dict[str, Callable[[Net], torch.Tensor]] = {
    "squares": squares,
    "product": lambda m: (m.first.weight @ m.last.weight.t()).square().mean(),
    "vector": lambda m: utils.parameters_to_vector(m.parameters()).square().mean(),
    "rows": lambda m: sum(row.square().sum() for row in m.last.weight),
    "stacked": lambda m: torch.stack([m.first.weight, m.last.weight]).square().sum(),
    "a view": lambda m: m.last.weight.view(-1).square().sum() + m.scale.view(()),
    "linear": lambda m: nn.functional.linear(torch.ones(2, 64), m.last.weight).square().mean(),
    "with its data": lambda m: (m.last.weight * m.last.weight.data).sum(),
}


def test_losses_of_parameters(settings: Settings, tmp_path: Path) -> None:
    model, optimizer = managed(settings, tmp_path)
    expected, adam = plain()
    for seed, (name, penalty) in enumerate(PENALTIES.items()):
        losses = []
        for each, its in ((model, optimizer), (expected, adam)):
            its.zero_grad()
            loss = loss_of(each, seed) + 1e-2 * penalty(each)
            loss.backward()
            its.step()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses, msg=lambda m, n=name: f"{n}: {m}")
        del loss, losses
        assert_nothing_is_used(optimizer)
    assert_same(model, expected)
    optimizer.engine.close()


def test_a_parameter_that_changed_after_its_use_is_stale(
    settings: Settings, tmp_path: Path
) -> None:
    model, optimizer = managed(settings, tmp_path)
    for write in (lambda p: p.mul_(2), lambda p: p.data.mul_(2)):
        loss = squares(model)
        with torch.no_grad():
            write(model.last.weight)
        with pytest.raises(RuntimeError, match="modified by an inplace|as it was before"):
            loss.backward()
        optimizer.zero_grad()
    train(model, optimizer)
    optimizer.engine.close()


def test_what_a_write_leaves_alone_is_not_stale(settings: Settings, tmp_path: Path) -> None:
    model, optimizer = managed(settings, tmp_path)
    bias, other = model.first.bias, model.unused.weight
    assert optimizer.engine.find(bias).chunk is optimizer.engine.find(other).chunk
    loss = bias.square().sum()
    with torch.no_grad():
        other.zero_()
    loss.backward()
    optimizer.engine.close()


def test_backward_to_some_parameters_brings_none_of_them_in(
    settings: Settings, tmp_path: Path
) -> None:
    """autograd needs their nodes alone, as long as it runs."""
    model, optimizer = managed(settings, tmp_path)
    expected, adam = plain()
    members, in_use = optimizer.engine.params.in_order(), []
    model.first.weight.register_hook(lambda _: in_use.extend(m.name for m in members if m.uses))
    found: list[list[torch.Tensor]] = []
    for each, its in ((model, optimizer), (expected, adam)):
        some = [each.last.weight, each.first.weight, each.scale]
        loss_of(each).backward(inputs=some)
        assert [p.grad is None for p in each.parameters()].count(False) == len(some)
        params = list(each.parameters())
        grads = torch.autograd.grad(loss_of(each, 2), params, allow_unused=True)
        zeros = torch.autograd.grad(loss_of(each, 3), params, materialize_grads=True)
        found.append([*(g for g in grads if g is not None), *zeros])
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(loss_of(each), [each.unused.weight, each.scale])
        its.step()
    assert in_use == []
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert_same(model, expected)
    assert_nothing_is_used(optimizer)
    optimizer.engine.close()
