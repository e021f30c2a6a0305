"""hetero/tiling/cross_entropy: a gradient that is accumulated in the middle of a backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetero.tiling import cross_entropy as leaf_gradients
from hetero.tiling.cross_entropy import accumulate_now


class _Doubled(torch.autograd.Function):
    """2 * param, whose gradient is accumulated at once; `done` says whether it was."""

    done: list[bool]

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor) -> torch.Tensor:
        ctx.param = param
        return param * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor | None:
        _Doubled.done.append(accumulate_now(ctx.param, grad * 2))
        return None if _Doubled.done[-1] else grad * 2


def doubled(param: torch.Tensor) -> torch.Tensor:
    _Doubled.done = []
    made: torch.Tensor = _Doubled.apply(param)  # type: ignore[no-untyped-call]
    return made


def test_it_comes_before_the_other_gradient() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    seen: list[torch.Tensor] = []
    param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))  # type: ignore
    (param.exp() * doubled(param)).sum().backward()
    assert _Doubled.done == [True]
    first = 2 * torch.ones(3).exp()
    assert len(seen) == 2
    assert torch.equal(seen[0], first)
    assert torch.equal(seen[1], first + 2 * torch.ones(3).exp())


def test_functional_gradients_accumulate_nothing() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    (found,) = torch.autograd.grad((param * 3 + doubled(param)).sum(), param)
    assert _Doubled.done == [False]
    assert param.grad is None
    assert torch.equal(found, torch.full((3,), 5.0))


def test_a_backward_to_other_inputs() -> None:
    param, other = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    (doubled(param) * other).sum().backward(inputs=[other])
    assert param.grad is None
    loss = (doubled(param) * other).sum()
    loss.backward(inputs=[param])
    assert torch.equal(param.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]


def test_what_is_no_leaf() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    doubled(param * 1).sum().backward()
    assert _Doubled.done == [False]
    assert torch.equal(param.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]


def test_with_several_ranks_autograd_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaf_gradients, "_are_several_ranks", lambda: True)
    param = torch.nn.Parameter(torch.ones(3))
    doubled(param).sum().backward()
    assert _Doubled.done == [False]
    assert torch.equal(param.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]
