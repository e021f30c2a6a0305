"""hetero/runtime/modules/torch_function_uses: parameters written to outside their modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import utils

import hetero
from tests.support.training.small_net import (
    EMULATED,
    SETTINGS,
    Net,
    Settings,
    assert_nothing_is_used,
    assert_same,
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
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            nn.Linear(64, 64).weight.data = model.last.weight.data.view(64, 64)
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
