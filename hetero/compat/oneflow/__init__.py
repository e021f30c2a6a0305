"""OneFlow's names: `from hetero.compat import oneflow as flow`, for `import oneflow as flow`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from hetero.compat.oneflow import nn, optim
from hetero.compat.ranks import join

__all__ = ["Tensor", "nn", "optim", "placement", "sbp"]

_MAKERS = [
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
]


@dataclass(frozen=True)
class Sbp:
    """A division over ranks: a split along a dimension, or broadcast (None)."""

    dim: int | None = None


class sbp:
    """oneflow.sbp."""

    broadcast = Sbp()
    split = Sbp


class placement:
    """oneflow.placement: the ranks that have something, which must be all; `type` has no effect."""

    def __init__(self, type: str, ranks: Sequence[int]) -> None:
        join()
        self.type, self.ranks = type, list(ranks)


class Tensor(torch.Tensor):
    """torch's, with to_global()."""

    def to_global(self, placement: Any = None, sbp: Any = None) -> torch.Tensor:
        """This rank's part; raises ValueError unless all ranks have rows, or everything."""
        nn.check_view(placement, sbp, [None, 0], "data must be split along dimension 0, not {}")
        return self.as_subclass(torch.Tensor)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As of torch.Tensor; without a GPU "cuda" changes nothing."""
        if not torch.cuda.is_available():
            args = tuple(arg for arg in args if not _is_cuda(arg))
            kwargs = {name: value for name, value in kwargs.items() if not _is_cuda(value)}
        return super().to(*args, **kwargs) if args or kwargs else self


def _is_cuda(value: object) -> bool:
    return isinstance(value, (str, torch.device)) and torch.device(value).type == "cuda"


def __getattr__(name: str) -> Any:
    """torch's; tensors that it makes may be made global."""
    make = getattr(torch, name)
    if name not in _MAKERS:
        return make

    @wraps(make)
    def made(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        tensor: Tensor = make(*args, **kwargs).as_subclass(Tensor)
        return tensor if device is None else tensor.to(device=device)

    return made
