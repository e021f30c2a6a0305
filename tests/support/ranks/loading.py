"""Ranks that load a saved model together inside ZeroInitContext."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import hetero
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
