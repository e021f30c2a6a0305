"""One parameter under construction: where its bytes are, and whether they may move."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hetero.stand_ins.construction_uses import ConstructionAlias
from offload.errors import HeteroError

_USES_OF_UNSHARED = 2  # of a storage to which only the parameter and the counting code refer
_USES_OUTSIDE_GRAPHS = 1  # of a parameter which no graph of autograd has


@dataclass(eq=False)
class Record:
    """A parameter under construction, and where its bytes are.

    Attributes:
        param: the parameter.
        gone: tells the arena when it is deleted; not at the interpreter's exit, when modules are
            empty already.
        number: its place in the order of adoption (an id is used again when a parameter is gone).
        nbytes: its size in the last dtype it had.
        charged: bytes charged for the whole parameter in RAM; 0 if it is offloaded.
        uses: blocks of present() that it is in.
        part: this rank's part of it, if that is in RAM.
        space: its bytes in the scratch file; kept while it is in RAM.
        brought: the elements that bring_elements() brought, in the construction dtype, and the
            first one's number.
    """

    param: weakref.ref[torch.nn.Parameter]
    gone: weakref.finalize[..., Any]
    number: int
    nbytes: int
    charged: int
    uses: int = 0
    part: torch.Tensor | None = None
    space: slice = field(default_factory=lambda: slice(0, 0))
    brought: tuple[int, torch.Tensor] | None = None


def may_be_offloaded(param: torch.nn.Parameter, heed_graphs: bool) -> bool:
    """Whether nothing but the parameter refers to its memory, so that no write can be lost.

    `heed_graphs`: nor has a graph of autograd saved the parameter itself, whose backward would read
    the stand-in.
    """
    with torch._C.DisableTorchFunction():
        storage = param.untyped_storage()
        in_graphs = param._use_count() > _USES_OUTSIDE_GRAPHS  # type: ignore[attr-defined]
    nbytes = param.numel() * param.element_size()
    return (
        not (heed_graphs and in_graphs)
        and 0 < nbytes == storage.nbytes()
        and torch._C._storage_Use_Count(storage._cdata) <= _USES_OF_UNSHARED
    )


def check_adoptable(param: torch.nn.Parameter) -> None:
    """Raises HeteroError if it is not on the CPU, or has no values of its own."""
    if isinstance(param, ConstructionAlias):
        raise HeteroError(
            f"a parameter was made of the .data, or of the state_dict(), of one of shape "
            f"{tuple(param.shape)} that is under construction; make it of a copy: .clone()"
        )
    if param.device.type != "cpu":
        raise HeteroError(
            f"a parameter of shape {tuple(param.shape)} was made on {param.device}; build the "
            f"model on the CPU: hetero places it"
        )


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A function that calls the bound method as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: object) -> None:
        alive = reference()
        if alive is not None:
            alive(*arguments)

    return call
