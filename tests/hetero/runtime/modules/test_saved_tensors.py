"""hetero/runtime/modules/saved_tensors: what autograd saves goes with its graph."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hetero
from tests.support.training.small_net import (
    EMULATED,
    SETTINGS,
    Settings,
    loss_of,
    managed,
)
from tests.support.training.smallest import smallest_host_memory

pytestmark = pytest.mark.usefixtures("nothing_left")


class Stop(Exception):
    """A user's exception."""


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
    tensors it is refused, and never another value."""

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
    if determinism_check == "none":
        with pytest.raises(RuntimeError):
            grad_of(model)
    else:
        found = grad_of(model)
        assert expected is not None
        assert found is not None
        assert torch.equal(found, expected)
    optimizer.engine.close()
