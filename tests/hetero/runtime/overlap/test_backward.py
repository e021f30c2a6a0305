"""Updates that begin while backward still runs: when they begin, and failures."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from torch import nn

import hetero
from offload.device.backend import EmulatedBackend
from offload.errors import HeteroError
from tests.support.training.overlap_net import (
    STEPS,
    WIDTH,
    Net,
    build,
    loss_of,
    one_step,
    untied,
)
from tests.support.waiting import until


def test_torch_func_where_nothing_is_gathered(tmp_path: Path) -> None:
    """It allows no hooks of saved tensors, and none is needed."""
    model, optimizer = build(Net, tmp_path, "optim_states", "both")
    x = torch.randn(8, WIDTH, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).float().square().sum(), x)
    found = torch.func.grad(lambda y: model(y).float().square().sum())(x.detach())
    assert torch.equal(found, expected)
    optimizer.engine.close()


def test_a_failed_update_is_told(tmp_path: Path) -> None:
    model, optimizer = build(Net, tmp_path, "optim_states", "backward")
    one_step(model, optimizer, 0)
    optimizer.engine.chunk_groups[0].pipeline.inject(2)
    with pytest.raises(RuntimeError, match="made to fail"):
        one_step(model, optimizer, 1)
    optimizer.engine.close()


def test_updates_are_made_while_backward_runs(tmp_path: Path) -> None:
    """The last node of backward waits for updates of what came before it."""
    model, optimizer = build(untied, tmp_path, "disk", "backward")
    one_step(model, optimizer, 0)
    pipeline, made = optimizer.engine.chunk_groups[0].pipeline, []
    before = pipeline.stats["tasks"]
    tiles = sum(chunk.slots for chunk in optimizer.engine.layout.chunks)

    def wait(grad: torch.Tensor) -> None:
        until(lambda: pipeline.stats["tasks"] - before >= tiles // 2)
        made.append(pipeline.stats["tasks"] - before)

    def watch(module: nn.Module, args: tuple[torch.Tensor]) -> None:
        args[0].register_hook(wait)

    handle = model.blocks[0].register_forward_pre_hook(watch)
    loss_of(model, 1).backward()
    handle.remove()
    assert len(made) == 1
    assert tiles // 2 <= made[0] < tiles, "not the first layer's, whose gradient is not there"
    optimizer.step()
    assert pipeline.stats["tasks"] - before == tiles
    optimizer.engine.close()


def test_a_chunk_whose_gradient_was_lost_is_not_taken_for_updated(tmp_path: Path) -> None:
    model, optimizer = build(Net, tmp_path, "emulated", "backward")
    backend = optimizer.engine.backend
    assert isinstance(backend, EmulatedBackend)
    data = torch.randn(STEPS, 8, WIDTH)
    for x in data[:2]:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    backend.d2h.inject(1, error=errno.EIO)
    model(data[2]).float().square().mean().backward()
    for _ in range(2):
        with pytest.raises(HeteroError, match="the gradient of .* did not arrive in RAM"):
            optimizer.step()
    optimizer.engine.close()


def test_close_with_updates_under_way(tmp_path: Path) -> None:
    """After step(), or in the middle of one."""
    for place, overlap in (("ram", "forward"), ("disk", "backward"), ("emulated", "both")):
        model, optimizer = build(Net, tmp_path, place, overlap)
        one_step(model, optimizer, 0)
        if overlap != "forward":
            loss_of(model, 1).backward()
        optimizer.engine.close()
        with pytest.raises(hetero.ClosedError):
            loss_of(model, 2)
