"""A touch: one use of a parameter, gradient, optimizer or model that training code makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.training import small_net


class Net(small_net.Net):
    """With parameters that no forward uses, so that not all fit the smallest budget."""

    def __init__(self) -> None:
        super().__init__()
        self.ballast = ballast()


def ballast() -> nn.ParameterList:
    """Parameters of some chunks."""
    return nn.ParameterList(nn.Parameter(torch.full((64, 64), 0.1)) for _ in range(4))


def changed(how: Callable[[Net], object]) -> Callable[[], Net]:
    """Builds a net, and changes it."""

    def build() -> Net:
        made = Net()
        how(made)
        return made

    return build


@dataclass
class Case:
    """A model and its optimizer, managed by hetero or plain, that a touch is made on."""

    model: Any
    optimizer: Any
    dtype: torch.dtype
    path: Path  # a folder for files
    managed: bool
    rank: int | None = None  # None: it has the batches of all ranks

    @property
    def params(self) -> list[nn.Parameter]:
        """All parameters of the model."""
        return list(self.model.parameters())

    @property
    def closeness(self) -> str:
        """What difference() is told of what is computed in this dtype."""
        return "fp32" if self.dtype is torch.float32 else "bf16"

    def inputs(self, seed: int = 1) -> torch.Tensor:
        """This rank's half of a batch, or all of it."""
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)).to(self.dtype)
        return x if self.rank is None else x[2 * self.rank :][:2]

    def loss(self, seed: int = 1, model: nn.Module | None = None) -> torch.Tensor:
        """A loss on `inputs`, in fp32; the mean over the ranks is that on all inputs."""
        used = self.model if model is None else model
        return (used(self.inputs(seed)).float() - 1).square().mean()

    def backward(self, seed: int = 1) -> None:
        """The gradients of one micro-batch."""
        self.loss(seed).backward()

    def train(self, seed: int = 1) -> None:
        """One step."""
        self.optimizer.zero_grad()
        self.backward(seed)
        self.optimizer.step()


Use = Callable[[Case], object]


@dataclass(frozen=True)
class Touch:
    """What is done, and how it is compared with plain PyTorch."""

    name: str
    use: Use
    # What the touch returns equals plain PyTorch's in every bit; else, up to rounding.
    exact: bool = False
    # The model trains on after the touch, and must still be the plain one's equal.
    goes_on: bool = True
    build: Callable[[], nn.Module] = Net
    # The optimizer's first argument, from the model.
    groups: Callable[[nn.Module], Any] = nn.Module.parameters
    # Not all parameters fit the smallest budget that works, in the columns of nvme.
    on_disk: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)  # more of hetero's


@dataclass
class Section:
    """The touches of one noun, in the order of the page."""

    title: str
    exact: bool = False
    touches: list[Touch] = field(default_factory=list)

    def add(self, name: str, use: Use, **options: Any) -> None:
        """Adds a touch; `options` are the other fields of Touch."""
        self.touches.append(Touch(name, use, **{"exact": self.exact, **options}))

    def touch(self, name: str, **options: Any) -> Callable[[Use], Use]:
        """Adds the function that is decorated."""

        def added(use: Use) -> Use:
            self.add(name, use, **options)
            return use

        return added
