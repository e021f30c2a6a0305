"""Parameters used outside of their modules (torch_function_uses), as in plain PyTorch."""

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
from torch.optim.swa_utils import AveragedModel

import hetero
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
    pytest.mark.covering(1),
    pytest.mark.parametrize("settings", [*SETTINGS, EMULATED]),
]


# Reads

READS: dict[str, Callable[[Net], object]] = {
    "sum": lambda m: [p.sum() for p in m.parameters()],
    "item": lambda m: m.scale.item(),
    "float": lambda m: float(m.scale),
    "mean of .data": lambda m: [p.data.mean() for p in m.parameters()],
    "norm of detach": lambda m: [p.detach().norm() for p in m.parameters()],
    "foreach norm": lambda m: torch._foreach_norm(list(m.parameters())),
    "total norm": lambda m: utils.get_total_norm([p.detach() for p in m.parameters()]),
    "parameters_to_vector": lambda m: utils.parameters_to_vector(m.parameters()).detach(),
    "vector without grad": lambda m: without_grad(utils.parameters_to_vector, m.parameters()),
    "cat of data": lambda m: torch.cat([p.data.flatten() for p in m.parameters()]),
    "numpy": lambda m: torch.from_numpy(np.array(m.last.weight.detach())),
    "numpy of data": lambda m: torch.from_numpy(m.last.weight.data.numpy().copy()),
    "tolist": lambda m: m.last.bias.tolist(),
    "list of rows": lambda m: [row.sum() for row in m.last.weight],
    "rows without grad": lambda m: without_grad(lambda: [r.sum() for r in m.last.weight]),
    "a part": lambda m: m.last.weight[3:5, ::2].clone().detach(),
    "a part of data": lambda m: m.last.weight.data[3:5, ::2].t().contiguous(),
    "by lists": lambda m: m.last.weight.data[[3, 4], [1, 2]],
    "by a mask": lambda m: m.last.weight.data[m.last.weight.data > 0].sum(),
    "by an array": lambda m: m.last.weight.detach()[np.array([5, 6])].clone(),
    "compare": lambda m: bool((m.last.weight == m.last.weight).all()),
    "repr": lambda m: repr(m.first.bias),
    "repr of data": lambda m: repr(m.first.bias.data),
    "twice": lambda m: torch.cat([*m.parameters(), *m.parameters()][1:2] * 2).detach(),
    "all twice": lambda m: torch.cat([m.first.weight, m.last.weight] * 3).detach(),
    "matmul": lambda m: (m.first.weight @ m.last.weight).detach(),
    "linear": lambda m: nn.functional.linear(torch.ones(2, 64), m.last.weight).detach(),
    "linear of data": lambda m: nn.functional.linear(torch.ones(2, 64), m.last.weight.data),
    "to": lambda m: m.last.weight.to(torch.float64).detach(),
    "data to": lambda m: m.last.weight.data.double(),
    "pickled": lambda m: pickle.loads(pickle.dumps(m.last.weight)),
    "pickled data": lambda m: pickle.loads(pickle.dumps(m.last.weight.data)),
    "saved": lambda m: saved(m.last.weight),
    "deepcopy of one": lambda m: copy.deepcopy(m.last.weight),
    "deepcopy of two": lambda m: copy.deepcopy([m.last.weight, m.last.weight]),
    "type of it": lambda m: type(m.last.weight)(m.last.weight.data.clone()),
    "zeros_like": lambda m: torch.zeros_like(m.last.weight),
    "strides": lambda m: [m.last.weight.stride(), m.last.weight.is_contiguous()],
    "nbytes": lambda m: [m.last.weight.nbytes, m.last.weight.data.nbytes],
    "histogram": lambda m: torch.histc(m.last.weight.detach(), 7),
    "any nan": lambda m: [bool(torch.isnan(p).any()) for p in m.parameters()],
    "max": lambda m: [p.abs().max().item() for p in m.parameters()],
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


@pytest.mark.parametrize("read", READS)
def test_reads(read: str, settings: Settings, tmp_path: Path) -> None:
    model, optimizer = managed(settings, tmp_path)
    expected, adam = plain()
    train(model, optimizer)
    train(expected, adam)
    found, wanted = READS[read](model), READS[read](expected)
    if isinstance(wanted, str):
        assert found.split("e")[0] == wanted.split("e")[0]
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    del found
    assert_nothing_is_used(optimizer)
    train(model, optimizer)
    train(expected, adam)
    assert_same(model, expected)
    optimizer.engine.close()


# Averages of weights


@pytest.mark.parametrize("how", ["lerp_", "mul_ and add_", "foreach", "data"])
def test_an_average_of_weights(how: str, settings: Settings, tmp_path: Path) -> None:
    model, optimizer = managed(settings, tmp_path)
    expected, adam = plain()
    averages = []
    for each, its in ((model, optimizer), (expected, adam)):
        average = [p.detach().clone() for p in each.parameters()]
        for seed in range(3):
            train(each, its, seed)
            with torch.no_grad():
                if how == "foreach":
                    torch._foreach_lerp_(average, list(each.parameters()), 0.1)
                for mean, param in zip(average, each.parameters(), strict=True):
                    if how == "lerp_":
                        mean.lerp_(param, 0.1)
                    elif how == "mul_ and add_":
                        mean.mul_(0.9).add_(param, alpha=0.1)
                    elif how == "data":
                        mean.data.mul_(0.9).add_(0.1 * param.data)
        averages.append(average)
    torch.testing.assert_close(*averages, rtol=1e-5, atol=1e-6)
    optimizer.engine.close()


# Uses with gradients


def penalty(model: Net) -> torch.Tensor:
    return sum(p.pow(2).sum() for p in model.parameters())


PENALTIES: dict[str, Callable[[Net], torch.Tensor]] = {
    "squares": penalty,
    "abs": lambda m: sum(p.abs().sum() for p in m.parameters()),
    "product": lambda m: (m.first.weight @ m.last.weight.t()).square().mean(),
    "vector": lambda m: utils.parameters_to_vector(m.parameters()).square().mean(),
    "rows": lambda m: sum(row.square().sum() for row in m.last.weight),
    "stacked": lambda m: torch.stack([m.first.weight, m.last.weight]).square().sum(),
    "a part": lambda m: m.last.weight[:, 3].square().sum(),
    "a view": lambda m: m.last.weight.view(-1).square().sum() + m.scale.view(()),
    "linear": lambda m: nn.functional.linear(torch.ones(2, 64), m.last.weight).square().mean(),
    "with its data": lambda m: (m.last.weight * m.last.weight.data).sum(),
    "with detached": lambda m: (m.last.weight * m.first.weight.detach()).sum(),
}


@pytest.mark.parametrize("use", PENALTIES)
def test_losses_of_parameters(use: str, settings: Settings, tmp_path: Path) -> None:
    model, optimizer = managed(settings, tmp_path)
    expected, adam = plain()
    for seed in range(3):
        losses = []
        for each, its in ((model, optimizer), (expected, adam)):
            its.zero_grad()
            loss = loss_of(each, seed) + 1e-2 * PENALTIES[use](each)
            loss.backward()
            its.step()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses)
    assert_same(model, expected)
    del loss, losses
    assert_nothing_is_used(optimizer)
    optimizer.engine.close()


def test_a_parameter_that_changed_after_its_use_is_stale(
    settings: Settings, tmp_path: Path
) -> None:
    model, optimizer = managed(settings, tmp_path)
    for write in (lambda p: p.mul_(2), lambda p: p.data.mul_(2)):
        loss = penalty(model)
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


def test_uses_after_close_say_so(settings: Settings, tmp_path: Path) -> None:
    model, optimizer = managed(settings, tmp_path)
    data, loss = model.last.weight.data, penalty(model)
    optimizer.engine.close()
    for use in (
        lambda: model.last.weight.sum(),
        lambda: model.last.weight.data.sum(),
        lambda: model.last.weight.data.zero_(),
        lambda: model.state_dict()["last.weight"].sum(),
        lambda: loss.backward(),
        lambda: copy.deepcopy(model.last.weight),
        lambda: torch.save(model.state_dict(), io.BytesIO()),
    ):
        with pytest.raises(hetero.ClosedError, match=r"engine\.close\(\)"):
            use()
    assert "no values after engine.close()" in repr(model.last.weight) + repr(data)
    assert model.last.weight.shape == (64, 64)


# Copies of the model


def test_a_copy_of_the_model_is_plain(settings: Settings, tmp_path: Path) -> None:
    model, optimizer = managed(settings, tmp_path)
    train(model, optimizer)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert {type(p) for p in made.parameters()} == {nn.Parameter}
        for found, wanted in zip(made.parameters(), model.parameters(), strict=True):
            assert torch.equal(found, wanted.detach())
        adam = torch.optim.AdamW(made.parameters())
        train(made, adam)
        made.load_state_dict(model.state_dict())
        made.half()
    train(model, optimizer)
    assert_nothing_is_used(optimizer)
    optimizer.engine.close()


def test_averaged_model(settings: Settings, tmp_path: Path) -> None:
    model, optimizer = managed(settings, tmp_path)
    expected, adam = plain()
    averages = [AveragedModel(model), AveragedModel(expected)]
    for seed in range(3):
        for each, its, average in zip((model, expected), (optimizer, adam), averages, strict=True):
            train(each, its, seed)
            average.update_parameters(each)
    for found, wanted in zip(*(a.module.parameters() for a in averages), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    optimizer.engine.close()
