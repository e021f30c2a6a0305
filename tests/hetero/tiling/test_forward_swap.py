"""hetero/tiling/forward_swap: another forward, and nothing else."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from hetero.tiling.forward_swap import ForwardSwap


def negative(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return -nn.Linear.forward(module, x)  # type: ignore[arg-type]


def test_the_forward_changes_and_comes_back() -> None:
    linear, x = nn.Linear(3, 2), torch.randn(4, 3)
    plain, state = linear(x), linear.state_dict()
    calls: list[int] = []
    linear.register_forward_hook(lambda *_: calls.append(1))
    swap = ForwardSwap((linear, negative))
    assert isinstance(linear, nn.Linear)
    assert repr(linear) == repr(nn.Linear(3, 2))
    assert torch.equal(linear(x), -plain)
    assert list(linear.state_dict()) == list(state)
    swap.remove()
    swap.remove()
    assert type(linear) is nn.Linear
    assert torch.equal(linear(x), plain)
    assert len(calls) == 2


def test_copies_are_plain() -> None:
    linear, x = nn.Linear(3, 2), torch.randn(4, 3)
    plain = linear(x)
    ForwardSwap((linear, negative))
    file = io.BytesIO()
    torch.save(linear, file)
    file.seek(0)
    for made in (
        copy.deepcopy(linear),
        copy.copy(linear),
        pickle.loads(pickle.dumps(linear)),
        torch.load(file, weights_only=False),
    ):
        assert type(made) is nn.Linear
        assert torch.equal(made(x), plain)


def test_swaps_are_undone_in_order() -> None:
    linear = nn.Linear(3, 2)
    first, second = ForwardSwap((linear, negative)), ForwardSwap((linear, negative))
    with pytest.raises(RuntimeError, match="was changed to Linear since"):
        first.remove()
    second.remove()
    first.remove()
    assert type(linear) is nn.Linear
