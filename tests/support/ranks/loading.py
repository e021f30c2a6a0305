"""Ranks that build, or load, a model together inside ZeroInitContext."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import hetero
from hetero.stand_ins.construction_uses import rows_of
from offload.memory.tiers import Account, Tier
from tests.support.ranks.rank_training import BASE
from tests.support.training.saved_models import FAMILIES, batches, loss_of

LR = 1e-2


def is_trained(param: torch.nn.Parameter, what: str) -> bool:
    """Whether the parameter is trained, if all are, or "vectors" alone."""
    return what == "all" or param.ndim == 1


def load_and_step(
    rank: int, world: int, family: str, folder: str, options: dict[str, Any], trained: str
) -> dict[str, Any]:
    """Loads the folder, each rank with another seed, and makes a step; what this rank saw.

    `trained`: as is_trained() takes it.
    """
    with hetero.ZeroInitContext(BASE | options) as context:
        model = FAMILIES[family].load(Path(folder), seed=1 + rank)
    drawn = torch.rand(1).item()
    construction = context.construction
    ledger = construction.ledger
    found: dict[str, Any] = {
        "drawn": drawn,
        "peak in the block": ledger.peak_bytes["host"],
        "kept": [ledger.used(tier, Account.INIT) for tier in (Tier.HOST, Tier.DISK)],
        "offloaded": [construction.is_offloaded(p) for p in model.parameters()],
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
    }
    for param in model.parameters():
        param.requires_grad_(is_trained(param, trained))
    params = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = hetero.initialize(model, hetero.HybridAdam(params, lr=LR))
    found["masters"] = hetero.masters(list(model.parameters()))
    loss = loss_of(model, batches()[rank])
    loss.backward()
    optimizer.step()
    found["loss"] = loss.item()
    found["masters after a step"] = hetero.masters(list(model.parameters()))
    found["peak"] = optimizer.engine.ledger.peak_bytes["host"]
    optimizer.engine.close()
    return found


ROWS, WIDTH = 30013, 52


def layers() -> list[nn.Module]:
    """An embedding and a linear layer of 6 MiB each, with what people do to them."""
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
        ledger = context.construction.ledger
        found = {
            "weights": [rows_of(module.weight, slice(0, ROWS)) for module in made],  # type: ignore
            "some": rows_of(made[0].weight, slice(1001, 1007)),  # type: ignore[arg-type]
            "offloaded": [context.construction.is_offloaded(m.weight) for m in made],  # type: ignore
            "kept": [ledger.used(tier, Account.INIT) for tier in (Tier.HOST, Tier.DISK)],
            "peak": ledger.peak_bytes["host"],
        }
    context.construction.close()
    return found | {"next": torch.rand(1)}
