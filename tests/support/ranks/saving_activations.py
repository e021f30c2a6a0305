"""What ranks whose activations leave memory do in tests. Each function runs on every rank."""

from __future__ import annotations

from typing import Any

import torch

import hetero
from tests.support.ranks.rank_training import inputs, make


def steps(
    rank: int, world: int, options: dict[str, Any], rows: int
) -> tuple[list[torch.Tensor], int]:
    """Losses and masters after some steps, and the bytes of activations that were written."""
    model, optimizer = make("layers", {"chunk_numel": 16384, "rank_timeout_s": 30.0} | options)
    found = []
    for step in range(3):
        for micro_batch in range(2):
            x = torch.cat([inputs(rank, 8 * step + micro_batch, 128) for _ in range(rows)])
            loss = model(x).square().mean()
            loss.backward()
            found.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    found += hetero.masters(model.parameters())
    written = optimizer.engine.traffic.activations_written
    optimizer.engine.close()
    return found, written
