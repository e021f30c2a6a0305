"""Ranks that are about to make different updates are told, and nothing is changed; they read
gradients together."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import pytest
import torch

import hetero
from hetero.ranks.collectives import Collectives
from hetero.runtime import step
from tests.support.ranks.processes import RankPool
from tests.support.ranks.rank_training import BASE, Experts, inputs, make


def differing(rank: int, world: int, options: dict[str, Any], what: str) -> dict[str, Any]:
    """What the ranks are told, whether it changed anything, and whether they can go on."""
    torch.manual_seed(0)
    model = Experts(2)
    first, second = list(model.inner.parameters()), list(model.experts.parameters())
    optimizer = hetero.HybridAdam([{"params": first}, {"params": second, "lr": 0.1}], lr=0.01)
    hetero.initialize(model, optimizer, BASE | options)
    groups = optimizer.param_groups
    saved = [dict(group) for group in groups]
    model(inputs(rank, 0), 0).square().mean().backward()
    before = hetero.masters(model.parameters())
    if what == "plateau":
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        for step in range(2):
            schedule.step(1.0 + (rank - 0.5) * step)  # its own loss: on one rank it rises
    elif what == "clip":
        norm = optimizer.engine.grad_norm(first)  # (means are made by all ranks together)
        if norm > 0 and rank == 1:
            model.inner.weight.grad.mul_(0.5)
    elif rank == 1 and what == "group":
        for group, members in zip(groups, (first[1:], [*second, first[0]]), strict=True):
            group["params"] = members
    elif rank == 1:
        index, change = {
            "lr": (1, {"lr": 0.05}),
            "betas": (0, {"betas": (0.8, 0.999)}),
            "bias_correction": (0, {"bias_correction": False}),
            "text": (0, {"eps": "text"}),
            "notes": (0, {"initial_lr": 3.0, "note": "mine"}),
        }[what]
        groups[index].update(change)
    told = "nothing"
    try:
        optimizer.step()
    except hetero.PeerError:
        raise
    except hetero.HeteroError as error:
        told = str(error)
    unchanged = all(map(torch.equal, before, hetero.masters(model.parameters())))
    if what == "clip":
        optimizer.zero_grad()
        model(inputs(rank, 0), 0).square().mean().backward()
    for group, kept in zip(groups, saved, strict=True):
        group.update(kept)
    optimizer.step()
    moved = not torch.equal(before[0], hetero.masters(model.parameters())[0])
    optimizer.engine.close()
    return {"error": told, "unchanged": unchanged, "goes_on": moved}


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("what", "fact", "here", "there"),
    [
        ("lr", "lr of param group 1 is", "0.1", "0.05"),
        ("betas", "betas of param group 0 is", "0.9, 0.999", "0.8, 0.999"),
        ("bias_correction", "bias_correction of param group 0 is", "1.0", "0.0"),
        ("text", "eps of param group 0 is", "1e-08", "nan"),
        ("clip", "inner.weight is in param group 0 with its gradient times", "1.0", "0.5"),
        ("group", "inner.weight is in param group", "0", "1"),
        ("plateau", "lr of param group 0 is", "0.01", "0.001"),
    ],
)
def test_ranks_with_different_updates_are_told(
    ranks2: RankPool, stage: int, what: str, fact: str, here: str, there: str
) -> None:
    for rank, found in enumerate(ranks2.run(differing, {"zero_stage": stage}, what)):
        first, second = (here, there) if rank == 0 else (there, here)
        assert re.search(
            rf"updates of optimizer.step\(\) differ between ranks: {fact} {first}.* on rank {rank} "
            rf"and .*{second}.* on rank {1 - rank}",
            found["error"],
        )
        assert found["unchanged"]
        assert found["goes_on"]


def test_what_updates_do_not_use_may_differ(ranks2: RankPool) -> None:
    for found in ranks2.run(differing, {}, "notes"):
        assert found["error"] == "nothing"
        assert found["goes_on"]


def torchs_clip(rank: int, world: int) -> tuple[str, float, float]:
    """What is told, and the norms before and after the next step's clipping by hetero's."""
    model, optimizer = make("experts", {})
    model(inputs(rank, 0), rank).square().mean().backward()
    try:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        told = "nothing"
    except hetero.HeteroError as error:
        told = str(error)
    optimizer.zero_grad()
    model(inputs(rank, 0), rank).square().mean().backward()
    norm = hetero.clip_grad_norm_(model.parameters(), 1e-3).item()
    clipped = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()  # all are there now
    optimizer.step()
    optimizer.engine.close()
    return told, norm, clipped


def test_torchs_clipping_of_what_ranks_do_not_use_alike(ranks2: RankPool) -> None:
    """It lists each .grad before ranks meet, so its norm would lack those of other ranks alone."""
    found = ranks2.run(torchs_clip)
    for rank, (told, norm, clipped) in enumerate(found):
        assert told.startswith(f"the gradient of experts.{1 - rank}.weight, which other ranks")
        assert norm == found[0][1] > 1e-2
        assert clipped == pytest.approx(1e-3, rel=1e-4)


def torchs_value_clip(rank: int, world: int) -> str:
    model, optimizer = make("experts", {})
    model(inputs(rank, 0), rank).square().mean().backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4)
    with pytest.raises(hetero.HeteroError) as error:
        optimizer.step()
    optimizer.engine.close()
    return str(error.value)


def test_torchs_clipping_by_value_of_what_ranks_do_not_use_alike(ranks2: RankPool) -> None:
    """Each rank would clamp its shard of the gradients alone that it has listed."""
    for told in ranks2.run(torchs_value_clip):
        assert "clamped between -0.0001 and 0.0001 on rank" in told
        assert "hetero.clip_grad_value_()" in told


def one_step(rank: int, world: int, scale: float, factor: float) -> tuple[float, Any]:
    """The loss scale after a step with a GradScaler, unless it is 1, and the model's values;
    `factor` is of rank 0's loss."""
    model, optimizer = make("experts", {})
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale > 1)
    loss = model(inputs(rank, 0), rank).square().mean()
    scaler.scale(loss * (1.0 if rank else factor)).backward()
    scaler.unscale_(optimizer)
    hetero.clip_grad_norm_(model.parameters(), 1e-2)
    scaler.step(optimizer)
    scaler.update()
    values = hetero.masters(list(model.parameters()))
    optimizer.engine.close()
    return scaler.get_scale(), values


def test_a_grad_scaler_unscales_what_other_ranks_alone_have(ranks2: RankPool) -> None:
    """It lists each .grad before ranks meet."""
    expected, found = ranks2.run(one_step, 1.0, 1.0), ranks2.run(one_step, 64.0, 1.0)
    for (_, values), (scale, others) in zip(expected, found, strict=True):
        assert scale == 64.0
        assert all(map(torch.equal, values, others))
    assert [scale for scale, _ in ranks2.run(one_step, 64.0, math.inf)] == [32.0, 32.0]


def read_grads(rank: int, world: int) -> tuple[list[int], bool]:
    """Collectives by which one gradient is read, all, and all in two exchanges and in several;
    whether each time they are those that the placeholders have."""
    model, optimizer = make("experts", {})
    model(inputs(rank, 0), rank).square().mean().backward()
    hetero.clip_grad_norm_(model.parameters(), 1e-2)
    expected = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    assert sum(grad is None for grad in expected) == 4  # of experts that no rank has used

    def read(params: Iterable[torch.Tensor]) -> tuple[int, list[torch.Tensor | None]]:
        begin = Collectives.begin
        with patch.object(Collectives, "begin", autospec=True, side_effect=begin) as begun:
            grads = hetero.grads(params)
        return begun.call_count, grads

    counts = [read(model.inner.weight)[0]]
    same = True
    total = sum(grad.numel() for grad in expected if grad is not None)
    for numel in (step._READ_NUMEL, total - 1, 1):
        with patch.object(step, "_READ_NUMEL", numel):
            count, found = read(model.parameters())
        counts.append(count)
        for grad, other in zip(found, expected, strict=True):
            same = same and (grad is other is None or torch.equal(grad, other))
    optimizer.engine.close()
    return counts, same


def test_gradients_are_read_in_one_exchange(ranks2: RankPool) -> None:
    for (one, every, two, several), same in ranks2.run(read_grads):
        assert one == every
        assert (two, several) == (every + 3, every + 3 * 5)  # six have gradients
        assert same
