"""hetero/runtime/modules/saved_tensors: what autograd saves goes with its graph."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hetero
from tests.support.training.small_net import (
    EMULATED,
    SETTINGS,
    Net,
    Settings,
    loss_of,
    managed,
    plain,
)
from tests.support.training.smallest import smallest_host_memory

pytestmark = pytest.mark.usefixtures("nothing_left")


class Stop(Exception):
    """A user's exception."""


@pytest.mark.covering(1)
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("settings", [*SETTINGS, EMULATED])
def test_a_forward_without_a_backward_keeps_nothing(
    fails: bool, settings: Settings, tmp_path: Path
) -> None:
    """tanh() saves its own result, which would keep the node that has saved it."""
    model, optimizer = managed(settings, tmp_path)
    activations: list[weakref.ref[torch.Tensor]] = []

    def note(module: object, inputs: tuple[torch.Tensor, ...]) -> None:
        activations.append(weakref.ref(inputs[0]))
        if fails:
            raise Stop

    handle = model.last.register_forward_pre_hook(note)
    for _ in range(2):
        try:
            loss_of(model)
        except Stop:
            assert fails
    handle.remove()
    gc.collect()
    assert [ref() for ref in activations] == [None, None]
    engine = weakref.ref(optimizer.engine)
    optimizer.engine.close()
    del model, optimizer, handle, note
    gc.collect()
    assert engine() is None


class OwnWeight(torch.nn.Module):
    """Checkpoints a function of its own, which uses its own parameter outside any module's call."""

    def __init__(self, determinism_check: str) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 64)
        self.weight = torch.nn.Parameter(torch.rand(64, 64))
        self.determinism_check = determinism_check

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.first(x) @ self.weight)

        found: torch.Tensor = checkpoint(
            inner, x, use_reentrant=False, determinism_check=self.determinism_check
        )
        return found


@pytest.mark.parametrize("determinism_check", ["default", "none"])
def test_a_checkpoint_that_saw_a_parameter_gets_it_again(
    determinism_check: str, tmp_path: Path
) -> None:
    """It is in memory in forward, and not when backward recomputes. Where torch does not compare
    tensors it is refused, or right, and never another value."""

    def grad_of(model: torch.nn.Module) -> torch.Tensor | None:
        x = torch.ones(2, 64, requires_grad=True)
        model(x).square().sum().backward()
        return x.grad

    def made(host_memory: int) -> tuple[torch.nn.Module, hetero.HybridAdam]:
        options = {"dtype": "fp32", "chunk_numel": 4096, "nvme_path": str(tmp_path)}
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        torch.manual_seed(0)
        model.append(OwnWeight(determinism_check))
        return hetero.initialize(
            model,
            hetero.HybridAdam(model.parameters()),
            placement_policy="nvme",
            host_memory=host_memory,
            **options,
        )

    torch.manual_seed(0)
    expected = grad_of(OwnWeight(determinism_check))
    whole, optimizer = made(smallest_host_memory(lambda: made(1 << 16)))
    model = whole[-1]
    assert expected is not None
    try:
        found = grad_of(model)
    except RuntimeError:
        assert determinism_check == "none"
    else:
        assert found is not None
        assert torch.equal(found, expected)
    optimizer.engine.close()


class _Head(torch.autograd.Function):
    """A user's product by tiles of a weight, which it saves and reads again in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.cat([x @ weight[i : i + 16].t() for i in range(0, len(weight), 16)], 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        tiles = range(0, len(weight), 16)
        x_grad = sum(grad[:, i : i + 16] @ weight[i : i + 16] for i in tiles)
        assert isinstance(x_grad, torch.Tensor)
        return x_grad, grad.t() @ x


def _fused(model: Net, x: torch.Tensor) -> torch.Tensor:
    """Net.forward, with the last module's weight in a function and not in the module's call."""
    return _Head.apply(torch.tanh(model.first(x)), model.last.weight) + model.last.bias


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["plain", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("settings", [*SETTINGS, EMULATED])
def test_an_absent_parameter_that_a_function_saves(
    kind: str, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """autograd aliased what it has in its values' place: gradients were NaN (TRL's fused head)."""

    def forward(model: Net, x: torch.Tensor) -> torch.Tensor:
        if kind == "plain":
            return _fused(model, x)
        found: torch.Tensor = checkpoint(_fused, model, x, use_reentrant=kind == "reentrant")
        return found

    monkeypatch.setattr(Net, "forward", forward)

    def grad_and_losses(model: Net, optimizer: Any) -> tuple[torch.Tensor | None, list[float]]:
        torch.manual_seed(1)
        x, losses = torch.randn(4, 64, requires_grad=True), []
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return x.grad, losses

    wanted = grad_and_losses(*plain())
    model, optimizer = managed(settings, tmp_path)
    found = grad_and_losses(model, optimizer)
    optimizer.engine.close()
    assert found[1] == pytest.approx(wanted[1], rel=1e-5)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-7)
