"""Gradients that become zero, and are not cleared, are zero on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hetero
from tests.support.ranks.processes import RankPool

OPTIONS = {"lr": 1e-2}


def loss_of(model: nn.Module, rank: int, seed: int) -> torch.Tensor:
    """Of the rank's own data."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * rank + seed))
    loss: torch.Tensor = (model(x).float() - 1).square().mean()
    return loss


def build() -> nn.Module:
    """All parameters get gradients, so that a chunk is sent while backward runs."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4))


def train(rank: int, world: int, stage: int, how: str) -> float:
    """Five steps; how far the masters are from those of plain PyTorch over all ranks' data.

    Before every second one's only backward, or after its first, gradients become zero: "all" by
    zero_grad(), "each" by `p.grad.zero_()`, in another order on each rank.
    """
    model, plain = build(), build()
    given: dict[str, Any] = {"placement_policy": "cpu", "dtype": "fp32", "zero_stage": stage}
    model, optimizer = hetero.initialize(
        model, hetero.HybridAdam(model.parameters(), **OPTIONS), chunk_numel=4096 * world, **given
    )
    wanted = torch.optim.Adam(plain.parameters(), **OPTIONS)
    for step in range(5):
        for again in range(2):
            optimizer.backward(loss_of(model, rank, 2 * step + again))
            losses = [loss_of(plain, r, 2 * step + again) for r in range(world)]
            (torch.stack(losses).sum() / world).backward()
            if again == step % 2:
                if how == "all":
                    optimizer.zero_grad(set_to_none=False)
                else:
                    params = list(model.parameters())
                    for p in params if rank == 0 else reversed(params):
                        assert p.grad is not None
                        p.grad.zero_()
                wanted.zero_grad(set_to_none=False)
        optimizer.step()
        wanted.step()
        optimizer.zero_grad(set_to_none=False)
        wanted.zero_grad(set_to_none=False)
    masters = hetero.masters(model.parameters())
    pairs = zip(masters, plain.parameters(), strict=True)
    found = max((master - p.detach()).abs().max().item() for master, p in pairs)
    optimizer.engine.close()
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("how", ["all", "each"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zeros_replace_what_is_on_its_way_to_other_ranks(
    ranks2: RankPool, stage: int, how: str
) -> None:
    assert max(ranks2.run(train, stage, how)) < 1e-5
