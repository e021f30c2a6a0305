"""torch.compile with its own compiler, inductor: the same losses on one rank and on two."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hetero
from tests.support.ranks.processes import RankPool
from tests.support.training.plain_adam import OPTIONS
from tests.zoo.case import Where, vectors
from tests.zoo.handwritten import Block

STEPS = 2
PARTS = 2  # of a step's data: micro-batches of one rank, or ranks


def train(
    parts: Sequence[int], dtype: str, compiles: bool, process_group: Any = None
) -> list[float]:
    """The losses of these parts of the data; of two blocks one is compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    options: dict[str, Any] = {"chunk_numel": 4096, "placement_policy": "cpu"}
    with hetero.ZeroInitContext(dtype=dtype, process_group=process_group, **options):
        model = nn.Sequential(Block(), Block())
    model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters(), **OPTIONS))
    if compiles:
        # (In threads: processes of the compiler's would be left when this one is ended.)
        with patch.dict(os.environ, TORCHINDUCTOR_COMPILE_THREADS="1"):
            model[0].compile(backend="inductor")
    losses = []
    for step in range(STEPS):
        for part in parts:
            loss = model(vectors(Where(step, 0, part))).square().mean()
            optimizer.backward(loss / len(parts))
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.engine.close()
    return losses


def on_rank(rank: int, world: int, dtype: str) -> tuple[list[float], list[list[float]]]:
    """Losses of this rank's part; and on the first rank those of all parts, on this rank alone,
    compiled and not. (Processes import the compiler for seconds, so there is no third one.)"""
    first, alone = dist.new_group([0]), []
    if rank == 0:
        alone = [train(range(PARTS), dtype, compiles, first) for compiles in (True, False)]
    dist.barrier()  # the other rank finds what the compiler has made
    return train([rank], dtype, True), alone


# The compiler of C++ takes ten seconds and more for each.
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.extra)])
def test_losses_on_one_rank_and_on_two(ranks2: RankPool, dtype: str) -> None:
    (one, (alone, plain)), (other, _) = ranks2.run(on_rank, dtype)
    assert [alone[0::PARTS], alone[1::PARTS]] == [one, other]
    # (The compiler fuses operators, so that bf16 is rounded less often.)
    assert alone == pytest.approx(plain, rel=1e-5 if dtype == "fp32" else 1e-2)
