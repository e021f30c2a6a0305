"""Any training loop of any model, as data, and what one rank does in it: by hetero, or by torch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.training.overlap_net import WIDTH, Block


@dataclass(frozen=True)
class Model:
    """`uses` are (block, how it is run): the same one may come several times."""

    blocks: int
    uses: tuple[tuple[int, str], ...]
    tied: bool
    frozen: frozenset[int]


@dataclass(frozen=True)
class Step:
    """A step's micro-batches, each of which may leave out the uses from one on."""

    micro_batches: tuple[int, ...]
    left_out: bool  # a backward before, whose gradients are cleared
    told: bool  # no_sync() around all micro-batches but the last
    clip: float  # to this norm; 0: not
    between: str  # what is done before step()
    clear: str  # gradients "after" step(), "before" the next forward or "late", after it; or not
    overflow: bool  # with a GradScaler: gradients are infinite


@dataclass(frozen=True)
class Loop:
    """Steps, and what goes through all of them."""

    steps: tuple[Step, ...]
    scaler: bool  # a GradScaler
    decays: bool  # the learning rate, by a scheduler


class AnyNet(nn.Module):
    """What a Model says."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(model.blocks))
        self.outer = nn.Linear(WIDTH, WIDTH, bias=False)
        if model.tied:
            self.outer.weight = self.inner.weight
        for index in model.frozen:
            self.blocks[index % model.blocks].requires_grad_(False)
        self.uses = model.uses
        self.end = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for index, how in self.uses[: self.end or None]:
            block = self.blocks[index % len(self.blocks)]
            if how == "plain":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=how == "reentrant")
        return self.outer(x)


class Trainer(Protocol):
    """What trains, and what it does in its own way."""

    model: AnyNet
    optimizer: torch.optim.Optimizer

    def no_sync(self) -> AbstractContextManager[None]:
        """Around a backward that is not the step's last."""

    def between(self, what: str) -> None:
        """Does what a loop may do between backward and step(), by its name."""

    def clip(self, norm: float, unscaled_by: float) -> None:
        """Clips gradients, which were divided by `unscaled_by`, to `norm`; 0: not."""


def run(trainer: Trainer, loop: Loop, rank: int) -> list[float]:
    """Trains on the rank's own data. Returns its losses."""
    model, optimizer = trainer.model, trainer.optimizer
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=loop.scaler)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7) if loop.decays else None
    losses = []
    clear = ""
    for number, step in enumerate(loop.steps):
        if clear == "before":
            optimizer.zero_grad()
        if step.left_out:
            with trainer.no_sync():
                scaler.scale(_loss_of(model, rank, 500 + number)).backward()
            optimizer.zero_grad()
        for index, end in enumerate(step.micro_batches):
            more = step.told and index + 1 < len(step.micro_batches)
            with trainer.no_sync() if more else nullcontext():
                model.end = end
                loss = _loss_of(model, rank, 10 * number + index)
                losses.append(loss.item())
                if clear == "late" and index == 0:
                    optimizer.zero_grad()
                overflow = step.overflow and loop.scaler
                scaler.scale(loss * float("inf") if overflow else loss).backward()
        model.end = 0
        trainer.between(step.between)
        scaler.unscale_(optimizer)
        trainer.clip(step.clip, scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        if scheduler is not None:
            scheduler.step()
        clear = step.clear
        if clear == "after":
            optimizer.zero_grad()
    return losses


def _loss_of(model: nn.Module, rank: int, seed: int) -> torch.Tensor:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * rank + seed))
    loss: torch.Tensor = (model(x).float() - 1).square().mean()
    return loss
