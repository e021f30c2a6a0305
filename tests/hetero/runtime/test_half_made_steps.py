"""Between an update during backward and step() the step is half made: what is refused then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from offload.errors import HeteroError
from tests.support.training.overlap_net import (
    WIDTH,
    Net,
    build,
    loss_of,
    one_step,
    result,
    same,
)


@pytest.fixture
def half(tmp_path: Path) -> Iterator[tuple[nn.Module, hetero.HybridAdam]]:
    """A model whose backward has updated it, before step()."""
    model, optimizer = build(Net, tmp_path, "optim_states", "backward")
    one_step(model, optimizer, 0)
    loss_of(model, 1).backward()
    assert optimizer.engine.schedule.is_half_made
    yield model, optimizer
    optimizer.engine.close()


def test_what_is_refused_while_a_step_is_half_made(half: tuple[nn.Module, Any]) -> None:
    model, optimizer = half
    with pytest.raises(
        HeteroError, match=r"is used after it was updated.*optimizer.step\(\) first"
    ):
        loss_of(model, 2)
    with pytest.raises(HeteroError, match="is used after it was updated"):
        model.blocks[1].up(torch.zeros(1, WIDTH, dtype=torch.bfloat16))
    used = pytest.raises(HeteroError, match="is used after it was updated")
    with used, hetero.gathered(model.inner.weight):
        pass
    for wrong in (
        optimizer.zero_grad,
        optimizer.state_dict,
        model.state_dict,
        lambda: hetero.masters(model.parameters()),
        lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}),
    ):
        with pytest.raises(HeteroError, match=r"half made.*optimizer\.step\(\)"):
            wrong()
    for read in (model.inner.weight.sum, model.inner.weight.data.sum):
        with pytest.raises(HeteroError, match="is used after it was updated"):
            read()
    optimizer.step()
    assert not model.inner.weight.isnan().any()
    optimizer.zero_grad()
    one_step(model, optimizer, 2)


def test_a_second_backward_is_refused(tmp_path: Path) -> None:
    """Of a graph from before the update: its gradients would come too late."""
    model, optimizer = build(lambda: Net(tied=False), tmp_path, "ram", "backward")
    one_step(model, optimizer, 0)
    first, second = loss_of(model, 1), loss_of(model, 2)
    first.backward()
    with pytest.raises(HeteroError, match=r"another gradient|further backward of the same step"):
        second.backward()
    optimizer.engine.close()


def test_options_may_not_change_between(half: tuple[nn.Module, Any]) -> None:
    model, optimizer = half
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(HeteroError, match=r"lr of param group 0 is 0\.5 at step\(\) and was 0\.01"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-2
    optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 0.5  # here it may
    one_step(model, optimizer, 2)


def test_gradients_may_not_be_cleared_between(half: tuple[nn.Module, Any]) -> None:
    model, optimizer = half
    model.zero_grad()
    with pytest.raises(HeteroError, match=r"the gradient of .* was cleared after it was updated"):
        optimizer.step()


def test_gradients_may_not_be_assigned_between(half: tuple[nn.Module, Any]) -> None:
    model, optimizer = half
    model.inner.weight.grad = torch.ones(WIDTH, WIDTH, dtype=torch.bfloat16)
    with pytest.raises(HeteroError, match=r"inner\.weight gets another gradient"):
        optimizer.step()


def test_gradients_can_be_read_not_changed(half: tuple[nn.Module, Any]) -> None:
    model, optimizer = half
    norm = optimizer.engine.grad_norm(model.parameters())
    found = [g for g in hetero.grads(model.parameters()) if g is not None]
    total = torch.stack([g.double().square().sum() for g in found]).sum().sqrt()
    assert norm == pytest.approx(float(total), rel=1e-6)
    for wrong in (
        lambda: hetero.clip_grad_norm_(model.parameters(), 1.0),
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: hetero.clip_grad_value_(model.parameters(), 1.0),
        lambda: model.inner.weight.grad.mul_(2.0),
    ):
        with pytest.raises(HeteroError, match="cannot be clipped"):
            wrong()
    optimizer.step()


def test_clipping_is_refused_before_harm_is_done(tmp_path: Path) -> None:
    """In the first step already, which updates nothing early."""
    model, optimizer = build(Net, tmp_path, "ram", "backward")
    loss_of(model, 0).backward()
    with pytest.raises(HeteroError, match="cannot be clipped"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    with pytest.raises(HeteroError, match="unscaled"):
        scaler.unscale_(optimizer)
    optimizer.engine.close()


@pytest.mark.parametrize("place", ["ram", "optim_states", "disk"])
def test_a_checkpoint_gives_a_step_up(tmp_path: Path, place: str) -> None:
    wanted = None
    for interrupted in (False, True):
        model, optimizer = build(Net, tmp_path, place, "backward")
        one_step(model, optimizer, 0)
        saved = optimizer.state_dict()
        if interrupted:
            loss_of(model, 7).backward()
            assert optimizer.engine.schedule.is_half_made
            if place != "ram":
                lacking = {**saved, "state": dict(list(saved["state"].items())[1:])}
                with pytest.raises(HeteroError, match="lacks"):
                    optimizer.load_state_dict(lacking)
            group = saved["param_groups"][0]
            for refused in ([group, group], [{**group, "params": group["params"][1:]}]):
                with pytest.raises(ValueError, match="param groups|parameters"):
                    optimizer.load_state_dict({**saved, "param_groups": refused})
                assert optimizer.engine.schedule.is_half_made  # nothing was given up for it
            optimizer.load_state_dict(saved)
            optimizer.zero_grad()
        one_step(model, optimizer, 1)
        one_step(model, optimizer, 2)
        found = result(model, optimizer)
        wanted = wanted or found
    assert wanted is not None
    assert same(wanted, found)
