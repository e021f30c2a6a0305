"""torch.compile with its own compiler, inductor: the same losses on one rank and on two."""

from __future__ import annotations

import os
from unittest.mock import patch

import pytest
import torch
from torch import nn

import hetero
from tests.support.ranks.processes import RankPool
from tests.support.training.plain_adam import OPTIONS
from tests.zoo.case import Where, vectors
from tests.zoo.handwritten import Block

STEPS = 3
PARTS = 2  # of a step's data: micro-batches of one rank, or ranks


def train(rank: int, world: int, dtype: str, compiles: bool) -> list[float]:
    """The losses of this rank's parts of the data; of two blocks one is compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with hetero.ZeroInitContext(dtype=dtype, chunk_numel=4096, placement_policy="cpu"):
        model = nn.Sequential(Block(), Block())
    model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters(), **OPTIONS))
    if compiles:
        # (In threads: processes of the compiler's would be left when this one is ended.)
        with patch.dict(os.environ, TORCHINDUCTOR_COMPILE_THREADS="1"):
            model[0].compile(backend="inductor")
    mine = range(PARTS) if world == 1 else [rank]
    losses = []
    for step in range(STEPS):
        for part in mine:
            loss = model(vectors(Where(step, 0, part))).square().mean()
            optimizer.backward(loss / len(mine))
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.engine.close()
    return losses


# The compiler of C++ takes ten seconds and more for each.
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.extra)])
def test_losses_on_one_rank_and_on_two(ranks2: RankPool, dtype: str) -> None:
    alone = train(0, 1, dtype, True)
    found = ranks2.run(train, dtype, True)  # (these find what the compiler has made already)
    assert [alone[0::PARTS], alone[1::PARTS]] == found
    plain = train(0, 1, dtype, False)
    # (The compiler fuses operators, so that bf16 is rounded less often.)
    assert alone == pytest.approx(plain, rel=1e-5 if dtype == "fp32" else 1e-2)
