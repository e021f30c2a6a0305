"""Models of blocks, and what an engine has computed again of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hetero
from hetero.runtime.recompute.recompute import Forward
from tests.support.ranks.rank_training import finish
from tests.support.training.loops import build


class Inner(nn.Module):
    """A residual block: two linear layers with a nonlinearity and dropout between them."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(self.dropout(F.gelu(self.inner(x))))


class Stack(nn.Module):
    """`count` residual blocks between a scale and nothing.

    Its attribute `outer_checkpoint` says of which kind of checkpoint the blocks are inside.
    """

    def __init__(self, count: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.blocks = nn.ModuleList([Inner(64, dropout) for _ in range(count)])
        self.outer_checkpoint: bool | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.outer_checkpoint is not None:
            return checkpoint(self._inside, x, use_reentrant=self.outer_checkpoint)
        return self._inside(x)

    def _inside(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.scale
        for block in self.blocks:
            x = block(x)
        return x


def latest(engine: hetero.Engine) -> Forward:
    """The last forward whose calls have been made."""
    calls: Any = engine.watch.block_calls
    assert calls is not None
    return calls._forward if calls._forward.costs else calls.latest


def plain_grads(
    make: Callable[[], nn.Module], loss: Callable[[Any], torch.Tensor]
) -> list[torch.Tensor]:
    """The gradients that torch alone computes, of a model under seed 0."""
    torch.manual_seed(0)
    model = make()
    loss(model).backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


def recomputing_steps(
    rank: int, world: int, options: dict[str, Any]
) -> tuple[list[torch.Tensor], list[list[bool]], list[int]]:
    """On every rank: losses and masters of some steps, and by step which calls were computed again
    and how many uses of chunks were not as the agreed order has them.

    Each step has two micro-batches.
    """
    given = {"dtype": "fp32", "chunk_numel": 16384, "rank_timeout_s": 30.0} | options
    model, optimizer = build(lambda: Stack(4, dropout=0.1), **given)
    torch.manual_seed(10 + rank)
    found, again, deviations = [], [], []
    for _ in range(4):
        for _ in range(2):
            loss = model(torch.randn(32, 64)).square().mean()
            loss.backward()
            found.append(loss.detach())
        if optimizer.engine.config.recompute != "none":
            again.append(list(latest(optimizer.engine).recomputed))
        gathers = optimizer.engine.chunk_groups[0].params.agreed_gathers
        if gathers is not None and gathers.uses.progress is not None:
            deviations.append(gathers.uses.progress.deviations)
        optimizer.step()
        optimizer.zero_grad()
    return found + finish(model, optimizer), again, deviations
