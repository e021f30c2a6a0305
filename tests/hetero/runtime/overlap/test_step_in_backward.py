"""step_in_backward=True: backward makes updates for good; the same bits, or an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from offload.errors import HeteroError
from tests.support.ranks import overlapping
from tests.support.ranks.processes import RankPool
from tests.support.training.overlap_net import (
    EVERYWHERE,
    Net,
    build,
    loss_of,
    one_step,
    result,
    same,
)


def early(optimizer: hetero.HybridAdam) -> int:
    """How many chunks backward has updated since the last step."""
    groups = optimizer.engine.chunk_groups
    return sum(s.made_early is not None for g in groups for s in g.updates.chunks)


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("kind", ["plain", "reentrant"])
def test_same_bits(tmp_path: Path, place: str, kind: str) -> None:
    """From the second step on backward updates all chunks, wherever their state is."""
    found = []
    for for_good in (False, True):
        model, optimizer = build(
            lambda: Net(kind=kind), tmp_path, place, "auto", step_in_backward=for_good
        )
        losses, counts = [], []
        for step in range(4):
            loss = loss_of(model, step)
            loss.backward()
            counts.append(early(optimizer))
            optimizer.step()
            assert early(optimizer) == 0
            optimizer.zero_grad()
            losses.append(loss.item())
        chunks = sum(c.trainable for c in optimizer.engine.layout.chunks)
        # (Gradients that are on their way from a device when backward ends are step()'s.)
        enough = chunks // 2 if EVERYWHERE[place].get("backend") else chunks
        assert counts[0] == 0
        assert all((count >= enough) is for_good for count in counts[1:]), counts
        found.append([torch.tensor(losses), *result(model, optimizer)])
    assert same(*found)


def test_all_but_the_last_micro_batch_are_inside_no_sync(tmp_path: Path) -> None:
    found = []
    for for_good in (False, True):
        model, optimizer = build(Net, tmp_path, "ram", "auto", step_in_backward=for_good)
        for step in range(4):
            with hetero.no_sync(model):
                loss_of(model, 2 * step).backward()
                assert early(optimizer) == 0
            loss_of(model, 2 * step + 1).backward()
            assert (early(optimizer) > 0) is (for_good and step > 0)
            optimizer.step()
            optimizer.zero_grad()
        found.append(result(model, optimizer))
    assert same(*found)


def clip(model: nn.Module, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def clamp(model: nn.Module, optimizer: Any) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def again(model: nn.Module, optimizer: Any) -> None:
    loss_of(model, 9).backward()


def clear(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()


def zero(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


def options(model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 2
    optimizer.step()


def drop(model: nn.Module, optimizer: Any) -> None:
    model.inner.weight.grad = None
    optimizer.step()


def assign(model: nn.Module, optimizer: Any) -> None:
    model.inner.weight.grad = torch.ones_like(model.inner.weight)
    optimizer.step()


def save(model: nn.Module, optimizer: Any) -> None:
    optimizer.state_dict()


@pytest.mark.parametrize("what", [clip, clamp, again, clear, zero, options, drop, assign, save])
def test_whatever_does_not_fit_is_an_error(
    tmp_path: Path, what: Callable[[nn.Module, Any], None]
) -> None:
    model, optimizer = build(Net, tmp_path, "ram", "auto", step_in_backward=True)
    one_step(model, optimizer, 0)
    saved = optimizer.state_dict()
    loss_of(model, 1).backward()
    assert early(optimizer) > 0
    with pytest.raises(HeteroError, match="step_in_backward"):
        what(model, optimizer)
    if what is clear:  # said once; then training may go on, or a checkpoint be loaded
        optimizer.zero_grad()
        optimizer.load_state_dict(saved)
        one_step(model, optimizer, 1)
    optimizer.engine.close()


def test_a_norm_that_is_small_enough_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = build(Net, tmp_path, "ram", "auto", step_in_backward=True)
    for step in range(3):
        loss_of(model, step).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        assert norm > 0
        optimizer.step()
        optimizer.zero_grad()
    optimizer.engine.close()


@pytest.mark.parametrize(
    "more",
    [
        {"dtype": "fp16"},
        {"undoable_steps": True},
        {"durable": True},
        {"overlap_updates": "none"},
    ],
)
def test_promises_that_need_the_old_state_are_refused(tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="step_in_backward=True makes updates that stay"):
        hetero.Config.make(step_in_backward=True, nvme_path=str(tmp_path), **more)


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks(ranks2: RankPool, stage: int) -> None:
    """Means are final in all ranks before any of them updates its shard."""
    options = {"zero_stage": stage, "placement_policy": "cpu"}
    wanted, found = (
        ranks2.run(overlapping.clipped_steps, options | more, [1e9] * 5)
        for more in ({}, {"step_in_backward": True})
    )
    for (begun, masters), (_, right) in zip(found, wanted, strict=True):
        assert all(map(torch.equal, masters, right))
        assert all(count > 0 for count in begun[1:])
