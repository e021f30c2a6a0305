"""Parameters written to outside of their modules (torch_function_uses): nothing stays in use.

tests/support/compatibility compares many more writes with plain PyTorch's, each on a model of its
own, and has those that are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

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
    pytest.mark.parametrize("settings", [*SETTINGS, EMULATED]),
]


def noisy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, tensor.numel()).view(tensor.shape)


def assign(model: Net) -> None:
    for param in model.parameters():
        param.data = noisy(param)


WRITES: dict[str, Callable[[Net], object]] = {
    "clamp_": lambda m: [without_grad(p.clamp_, -0.05, 0.05) for p in m.parameters()],
    "clamp_ of data": lambda m: [p.data.clamp_(-0.05, 0.05) for p in m.parameters()],
    "clamp_ of detach": lambda m: [p.detach().clamp_(-0.05, 0.05) for p in m.parameters()],
    "copy_": lambda m: [without_grad(p.copy_, noisy(p)) for p in m.parameters()],
    "zero_ of data": lambda m: [p.data.zero_() for p in m.parameters()],
    "data =": assign,
    "add_ of a view": lambda m: m.last.weight.data.view(-1)[5:9].add_(3.0),
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


def test_writes(settings: Settings, tmp_path: Path) -> None:
    model, optimizer = managed(settings, tmp_path)
    expected, adam = plain()
    for name, write in WRITES.items():
        for each, its in ((model, optimizer), (expected, adam)):
            train(each, its)
            write(each)
        assert_nothing_is_used(optimizer)
        for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(
                found, wanted, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
        assert_same(model, expected)
    train(model, optimizer)
    train(expected, adam)
    assert_same(model, expected)
    optimizer.engine.close()


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("write", ["clamp_", "clamp_ of data", "data =", "zero_ of data"])
def test_writes_in_half_precision(
    write: str, dtype: str, settings: Settings, tmp_path: Path
) -> None:
    """The parameter is what was written, and the master's rounding; the master is what it was where
    that is so already."""
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
        assert torch.equal(new.to(want.dtype), want)  # an update that moves nothing keeps it
        torch.testing.assert_close(new, want.float(), rtol=2**-8, atol=1e-37)
    train(model, optimizer)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    optimizer.engine.close()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_values_that_are_swapped_out_and_back_keep_their_masters(
    dtype: str, settings: Settings, tmp_path: Path
) -> None:
    """As for an evaluation of averaged weights: only what is there at the next step counts."""
    model, optimizer = managed(settings, tmp_path, dtype, initial_loss_scale=None)
    train(model, optimizer)
    before = hetero.masters(model.parameters())
    kept = [p.detach().clone() for p in model.parameters()]
    for param in model.parameters():
        without_grad(param.mul_, 0.5)
    evaluated = model(noisy(torch.empty(4, 64)).to(kept[0].dtype)).sum()
    assert evaluated.isfinite()
    for param, values in zip(model.parameters(), kept, strict=True):
        without_grad(param.copy_, values)
    for found, wanted in zip(hetero.masters(model.parameters()), before, strict=True):
        assert torch.equal(found, wanted)
    without_grad(model.first.weight.mul_, 0.5)  # before an update in backward
    train(model, optimizer, 2)
    assert not torch.equal(hetero.masters(model.first.weight)[0], before[0])
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
