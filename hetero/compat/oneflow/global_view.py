"""OneFlow's placements and SBPs, and tensors that may be made global."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hetero.compat.ranks import join, ranks


@dataclass(frozen=True)
class Sbp:
    """How something is divided over ranks: "broadcast", or "split" along a dimension."""

    kind: str
    dim: int | None = None


class sbp:
    """oneflow.sbp.

    Attributes:
        broadcast: every rank has all.
    """

    broadcast = Sbp("broadcast")

    @staticmethod
    def split(dim: int) -> Sbp:
        """Each rank has a part along the dimension."""
        return Sbp("split", dim)


class placement:
    """oneflow.placement: the ranks that have something.

    Args:
        type: "cuda" or "cpu"; not looked at: hetero computes where there is a GPU, on it.
        ranks: all ranks of the training.
    """

    def __init__(self, type: str, ranks: Sequence[int]) -> None:
        join()
        self.type, self.ranks = type, list(ranks)


def check_model_view(place: placement | None, view: Sbp | Sequence[Sbp] | None) -> None:
    """Raises ValueError unless a model is broadcast to all ranks."""
    _check_ranks(place)
    views = [view] if isinstance(view, Sbp) else list(view or [])
    if any(each.kind != "broadcast" for each in views):
        raise ValueError(
            "a model's sbp must be broadcast; config.enable_zero() of the graph shares it out"
        )


def _check_ranks(place: placement | None) -> None:
    if place is not None and sorted(place.ranks) != list(range(ranks())):
        raise ValueError(
            f"the placement has the ranks {place.ranks}, and the training {ranks()} ranks; give all"
        )


class Tensor(torch.Tensor):
    """torch's, with to_global()."""

    def to_global(self, placement: Any = None, sbp: Any = None) -> torch.Tensor:
        """This rank's part, which is what the rank computes with.

        Args:
            placement: all ranks.
            sbp: split(0), or broadcast.

        Raises:
            ValueError: for other ranks, or a split along another dimension.
        """
        _check_ranks(placement)
        if isinstance(sbp, Sbp) and sbp.kind == "split" and sbp.dim != 0:
            raise ValueError(f"data must be split along dimension 0, not {sbp.dim}")
        return self.as_subclass(torch.Tensor)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As of torch.Tensor; without a GPU "cuda" changes nothing."""
        if not torch.cuda.is_available():
            args = tuple(arg for arg in args if not _is_cuda(arg))
            if _is_cuda(kwargs.get("device")):
                kwargs.pop("device")
        return super().to(*args, **kwargs) if args or kwargs else self


def _is_cuda(value: object) -> bool:
    return isinstance(value, (str, torch.device)) and torch.device(value).type == "cuda"


def making(make: Callable[..., torch.Tensor]) -> Callable[..., Tensor]:
    """A function of torch that makes tensors, whose tensors may be made global."""

    def made(*args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.pop("device", None)
        tensor: Tensor = make(*args, **kwargs).as_subclass(Tensor)
        return tensor if device is None else tensor.to(device=device)

    made.__name__, made.__doc__ = make.__name__, make.__doc__
    return made
