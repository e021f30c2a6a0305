"""Parameters used outside their modules with two ranks: any reads alone, writes are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import utils

import hetero
from tests.support.ranks.processes import RankPool
from tests.support.training.small_net import Net, loss_of, plain


def used(rank: int, world: int, path: str, stage: int) -> list[torch.Tensor]:
    """Reads of every kind, of which rank 0 makes some alone, and a trained penalty."""
    torch.manual_seed(0)
    with hetero.ZeroInitContext(
        dtype="fp32", placement_policy="nvme", nvme_path=path, chunk_numel=4096, zero_stage=stage
    ):
        model = Net()
    model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters(), lr=1e-2))
    for seed in range(2):
        loss = loss_of(model, seed) + 1e-2 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        found = [p.grad.abs().max() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        found.append(utils.parameters_to_vector(model.parameters()).detach())
        found += [p.data.clone() for p in model.parameters()]
    masters = hetero.masters(model.parameters())
    with pytest.raises(hetero.HeteroError, match="changed in place"):
        with torch.no_grad():
            model.last.weight.clamp_(0, 1)
        optimizer.step()
    if stage == 3:
        assert torch.equal(model.last.weight, masters[-2]), "other ranks have it"
    optimizer.engine.close()
    return [*found, *masters] if rank == 0 else masters


@pytest.mark.parametrize("stage", [1, 3])
def test_uses_on_several_ranks(stage: int, ranks2: RankPool, tmp_path: Path) -> None:
    found, others = ranks2.run(used, str(tmp_path), stage)
    model, adam = plain()
    for seed in range(2):
        loss = loss_of(model, seed) + 1e-2 * sum(p.square().sum() for p in model.parameters())
        adam.zero_grad()
        loss.backward()
        adam.step()
    wanted = [p.grad.abs().max() for p in model.parameters() if p.grad is not None]
    params = [p.detach() for p in model.parameters()]
    wanted += [utils.parameters_to_vector(params), *params, *params]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.reshape(other.shape), other, rtol=1e-4, atol=1e-5)
    assert all(map(torch.equal, others, found[-len(others) :]))
