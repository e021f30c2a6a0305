"""Ranks that build parameters which are larger than the budget together."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import hetero
from hetero.stand_ins.construction_uses import rows_of
from tests.support.ranks.rank_training import BASE

ROWS, WIDTH = 60013, 52


def layers() -> list[nn.Module]:
    """An embedding and a linear layer of 12 MiB each, with what people do to them."""
    embedding, layer = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, ROWS)
    nn.init.normal_(embedding.weight, 0.1, 0.02)
    with torch.no_grad():
        layer.weight.mul_(0.5)
    return [embedding, layer]


def build(rank: int, world: int, options: dict[str, Any]) -> dict[str, Any]:
    """Builds them, each rank with another seed, and reads them inside the block."""
    torch.manual_seed(100 + rank)
    with hetero.ZeroInitContext(BASE | options) as context:
        made = layers()
        found = {
            "weights": [rows_of(module.weight, slice(0, ROWS)) for module in made],  # type: ignore
            "some": rows_of(made[0].weight, slice(1001, 1007)),  # type: ignore[arg-type]
            "next": torch.rand(1),
            "offloaded": [context.construction.is_offloaded(m.weight) for m in made],  # type: ignore
            "peak": context.construction.ledger.peak_bytes["host"],
        }
    context.construction.close()
    return found
