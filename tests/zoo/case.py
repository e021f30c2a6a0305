"""A case of the zoo: a model, its data and its loss, so that any training loop can run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_BALLAST = 8
WIDTH = 64  # of the models' vectors: a square matrix fills the smallest slot there is


@dataclass(frozen=True)
class Where:
    """Which micro-batch of a run is meant; data and random numbers depend on nothing else."""

    step: int
    micro: int = 0
    rank: int = 0

    @property
    def seed(self) -> int:
        """Different for each."""
        return 1 + self.step * 1000 + self.micro * 100 + self.rank

    def generator(self) -> torch.Generator:
        """For the micro-batch's data."""
        return torch.Generator().manual_seed(self.seed)


@dataclass(frozen=True)
class Case:
    """One way of writing a model.

    `batch(where)` makes a micro-batch, `loss(model, batch)` runs the model once and gives a scalar.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[Where], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    dtypes: tuple[str, ...] = ("fp32", "bf16")


def ballasted(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A model as `make` makes it, with unused parameters before all others.

    The least budget of a model that is hardly larger than the pools would hold its parameters. They
    come first because RAM that is left is given out in the parameters' order.
    """

    def made() -> nn.Module:
        model = make()
        children = dict(model._modules)
        model._modules.clear()
        model.ballast = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(_BALLAST))
        model._modules.update(children)
        return model

    return made


def vectors(where: Where) -> torch.Tensor:
    """(4, 6, WIDTH) normal numbers."""
    return torch.randn(4, 6, WIDTH, generator=where.generator())


def tokens(where: Where) -> torch.Tensor:
    """(2, 12) tokens below 101."""
    return torch.randint(1, 101, (2, 12), generator=where.generator())


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The mean of the squared output of a model that gives one tensor."""
    return model(batch).float().square().mean()
