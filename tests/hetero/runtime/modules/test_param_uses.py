"""hetero/runtime/modules/param_uses: parameters used outside their modules, as in plain PyTorch."""

from __future__ import annotations

import copy
import gc
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
from hetero.state.managed_param import ParamState
from tests.support.training.small_net import (
    EMULATED,
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
    pytest.mark.parametrize("settings", [*SETTINGS, EMULATED]),
]


def train(model: Net, optimizer: torch.optim.Optimizer, seed: int = 1) -> None:
    optimizer.zero_grad()
    loss_of(model, seed).backward()
    optimizer.step()


def assert_nothing_is_used(optimizer: hetero.HybridAdam) -> None:
    members = optimizer.engine.managed_params()
    assert {m.name: m.uses for m in members if m.uses} == {}
    assert {m.state for m in members} <= {ParamState.OFFLOADED, ParamState.RESIDENT}
    gc.collect()  # an exception's frames may view copies
    assert optimizer.engine.params.pinned_copies() == 0


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


def without_grad(function: Callable[..., object], *args: object) -> object:
    with torch.no_grad():
        return function(*args)


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


# Writes


def noisy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, tensor.numel()).view(tensor.shape)


def assign(model: Net) -> None:
    for param in model.parameters():
        param.data = noisy(param)


def assign_a_part(model: Net) -> None:
    with torch.no_grad():
        model.last.weight[3:5] = 1.5
        model.last.weight.data[0, ::2] = -0.5


def swap(model: Net) -> None:
    first, last = model.first.weight.data.clone(), model.last.weight.data.clone()
    model.first.weight.data.copy_(last)
    model.last.weight.data = first


def to_foreach(model: Net) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)
        torch._foreach_add_([p.data for p in model.parameters()], 0.25)


def initialise(model: Net) -> None:
    torch.manual_seed(7)
    nn.init.normal_(model.first.weight)
    nn.init.kaiming_uniform_(model.last.weight)
    nn.init.constant_(model.last.bias, 0.25)
    nn.init.orthogonal_(model.first.weight)
    nn.init.trunc_normal_(model.last.weight)
    model.unused.reset_parameters()


def vector(model: Net) -> None:
    made = utils.parameters_to_vector(model.parameters())
    utils.vector_to_parameters(made * 0.5, model.parameters())


WRITES: dict[str, Callable[[Net], object]] = {
    "clamp_": lambda m: [without_grad(p.clamp_, -0.05, 0.05) for p in m.parameters()],
    "clamp_ of data": lambda m: [p.data.clamp_(-0.05, 0.05) for p in m.parameters()],
    "clamp_ of detach": lambda m: [p.detach().clamp_(-0.05, 0.05) for p in m.parameters()],
    "lerp_": lambda m: without_grad(m.last.weight.lerp_, m.first.weight, 0.5),
    "lerp_ of data": lambda m: m.last.weight.data.lerp_(m.first.weight.data, 0.5),
    "copy_": lambda m: [without_grad(p.copy_, noisy(p)) for p in m.parameters()],
    "copy_ of data": lambda m: [p.data.copy_(noisy(p)) for p in m.parameters()],
    "zero_ of data": lambda m: [p.data.zero_() for p in m.parameters()],
    "data =": assign,
    "parts": assign_a_part,
    "rows of a list": lambda m: m.last.weight.data.__setitem__([1, 2], 1),
    "a mask": lambda m: m.last.weight.data.__setitem__(m.last.weight.data < 0, 0.5),
    "pairs of lists": lambda m: m.last.weight.data.__setitem__(([1, 2], [3, 4]), 2.0),
    "swap": swap,
    "foreach": to_foreach,
    "init": initialise,
    "vector_to_parameters": vector,
    "out=": lambda m: torch.add(m.first.weight.data, 1.0, out=m.last.weight.data),
    "add_ of a view": lambda m: m.last.weight.data.view(-1)[5:9].add_(3.0),
    "one of a list": lambda m: m.last.weight.data.unbind()[3].fill_(0.125),
    "in gathered()": lambda m: in_gathered(m),
}


def in_gathered(model: Net) -> None:
    params = list(model.last.parameters())
    if any(getattr(p, "_hetero_engine", None) for p in params):
        with hetero.gathered(params), torch.no_grad():
            params[0].mul_(0.5)
            params[1].data.fill_(1.0)
    else:
        params[0].data.mul_(0.5)
        params[1].data.fill_(1.0)


@pytest.mark.parametrize("write", WRITES)
def test_writes(write: str, settings: Settings, tmp_path: Path) -> None:
    model, optimizer = managed(settings, tmp_path)
    expected, adam = plain()
    for each, its in ((model, optimizer), (expected, adam)):
        train(each, its)
        WRITES[write](each)
    assert_nothing_is_used(optimizer)
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert_same(model, expected)
    for seed in (1, 2):
        train(model, optimizer, seed)
        train(expected, adam, seed)
    assert_same(model, expected)
    optimizer.engine.close()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("write", ["clamp_", "clamp_ of data", "data =", "zero_ of data"])
def test_writes_in_half_precision(
    write: str, dtype: str, settings: Settings, tmp_path: Path
) -> None:
    """The parameter is what was written; the master what it was where that is its rounding."""
    model, optimizer = managed(settings, tmp_path, dtype, initial_loss_scale=None)
    for seed in range(2):
        train(model, optimizer, seed)
    before = hetero.masters(model.parameters())
    values = [p.detach().clone() for p in model.parameters()]

    def noisy_in_dtype(tensor: torch.Tensor) -> torch.Tensor:
        return noisy(tensor).to(values[0].dtype)

    change: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "clamp_": lambda v: v.clamp(-0.05, 0.05),
        "clamp_ of data": lambda v: v.clamp(-0.05, 0.05),
        "data =": noisy_in_dtype,
        "zero_ of data": torch.zeros_like,
    }
    if write == "data =":
        for param in model.parameters():
            param.data = noisy_in_dtype(param)
    else:
        WRITES[write](model)
    wanted = [change[write](value) for value in values]
    for found, want in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(found.detach(), want)
    after = hetero.masters(model.parameters())
    for old, new, value, want in zip(before, after, values, wanted, strict=True):
        same = value == want
        assert torch.equal(new[same], old[same])
        torch.testing.assert_close(new, want.float(), rtol=2**-8, atol=1e-37)
    train(model, optimizer)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    optimizer.engine.close()


def test_a_write_in_the_modules_own_forward_is_kept(settings: Settings, tmp_path: Path) -> None:
    model, optimizer = managed(settings, tmp_path)
    expected, adam = plain()
    for each, its in ((model, optimizer), (expected, adam)):

        def clamp(module: nn.Module, *_: object) -> None:
            module.weight.data.clamp_(-0.1, 0.1)
            with torch.no_grad():
                module.bias.mul_(0.5)

        handle = each.last.register_forward_pre_hook(clamp)
        for seed in range(3):
            train(each, its, seed)
        handle.remove()
    assert_same(model, expected)
    optimizer.engine.close()


# What cannot be

REFUSED: dict[str, tuple[Callable[[Net], object], str]] = {
    "half": (lambda m: m.half(), "it cannot become .* torch.float16"),
    "double": (lambda m: m.double(), "it cannot become .* torch.float64"),
    "to(bf16)": (lambda m: m.to(torch.bfloat16), "it cannot become .* torch.bfloat16"),
    "to_empty": (lambda m: m.to_empty(device="cpu"), r"to_empty\(\) would lose its values"),
    "another shape": (lambda m: reshape(m), r"it cannot become \(3,\)"),
}


def reshape(model: Net) -> None:
    model.last.weight.data = torch.ones(3)


@pytest.mark.parametrize("change", ["t_", "share_memory_", "squeeze_"])
def test_another_memory_is_refused(change: str, settings: Settings, tmp_path: Path) -> None:
    model, optimizer = managed(settings, tmp_path)
    if settings["placement_policy"] == "nvme":
        with pytest.raises(hetero.HeteroError, match=r"would change the .* last\.weight"):
            without_grad(getattr(model.last.weight, change))
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            nn.Linear(64, 64).weight.data = model.last.weight.data
    with pytest.raises(hetero.HeteroError, match=r"copy: torch\.nn\.Parameter"):
        nn.Parameter(model.last.weight)
    optimizer.engine.close()


def test_a_write_that_fails_is_kept_as_far_as_it_came(settings: Settings, tmp_path: Path) -> None:
    model, optimizer = managed(settings, tmp_path)
    rows = torch.tensor([1, 99])
    with pytest.raises(IndexError, match="out of range|out of bounds"):
        model.last.weight.data.index_copy_(0, rows, torch.zeros(2, 64))
    found = model.last.weight.detach().clone()
    train(model, optimizer)
    optimizer.engine.close()
    assert found.isfinite().all()


def test_a_write_through_a_view_of_a_copy_is_told(settings: Settings, tmp_path: Path) -> None:
    model, optimizer = managed(settings, tmp_path)
    view = model.last.weight.view(-1)
    with torch.no_grad():
        view.mul_(0.5)
    if settings["placement_policy"] == "nvme":
        with pytest.raises(hetero.HeteroError, match="through a view .* that write is lost"):
            train(model, optimizer)
    del view
    train(model, optimizer)
    optimizer.engine.close()


@pytest.mark.parametrize("change", REFUSED)
def test_conversions_are_refused(change: str, settings: Settings, tmp_path: Path) -> None:
    model, optimizer = managed(settings, tmp_path)
    expected, adam = plain()
    convert, message = REFUSED[change]
    with pytest.raises(hetero.HeteroError, match=message):
        convert(model)
    model.to("cpu").float()  # changes nothing
    train(model, optimizer)
    train(expected, adam)
    assert_same(model, expected)
    optimizer.engine.close()


def test_an_array_of_absent_values_cannot_be_written_to(settings: Settings, tmp_path: Path) -> None:
    model, optimizer = managed(settings, tmp_path)
    array = model.last.weight.detach().numpy()
    if settings["placement_policy"] == "nvme":
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        with pytest.raises(hetero.HeteroError, match=r"last\.weight has no address now"):
            model.last.weight.data_ptr()
        with pytest.raises(hetero.HeteroError, match=r"last\.weight has no address now"):
            model.last.weight.data.data_ptr()
    else:
        array[0] = 1
        assert bool((model.last.weight[0] == 1).all())
    del array
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
