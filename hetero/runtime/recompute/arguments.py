"""The arguments of a block's call, as they are when it is made again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

# Arguments that are the same when a call is made again. Others may not be: a cache of keys and
# values has grown by then.
_PLAIN = (
    torch.Tensor,
    int,
    float,
    complex,
    bool,
    str,
    bytes,
    slice,
    range,
    torch.Size,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type(None),
)
# What has arguments in it. Other classes that torch can take apart, too, are arguments themselves:
# a call may change them, and then a copy of them would be changed instead.
_CONTAINERS = (tuple, list, dict)


def _is_leaf(value: Any) -> bool:
    is_named = isinstance(value, tuple) and hasattr(value, "_fields")
    return type(value) not in _CONTAINERS and not is_named


class Arguments:
    """The tensors and values in (args, kwargs), in their order, and how they were nested."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, spec = tree_flatten((args, kwargs), is_leaf=_is_leaf)
        self.leaves: Sequence[Any] = leaves
        self.spec: TreeSpec = spec

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those that are tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def size_bytes(self) -> int:
        """Of the first floating-point tensor: how large the micro-batch is."""
        return next((t.nbytes for t in self.tensors if t.is_floating_point()), 0)

    @property
    def odd_one(self) -> Any:
        """One that may be another when the call is made again; None: there is none."""
        return next((leaf for leaf in self.leaves if not isinstance(leaf, _PLAIN)), None)

    @property
    def versions(self) -> list[int]:
        """Of the tensors: they tell whether a call has changed them in place."""
        return [version_of(tensor) for tensor in self.tensors]


def nest(leaves: Sequence[Any], spec: TreeSpec) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of such leaves, in containers of their own."""
    args, kwargs = tree_unflatten(leaves, spec)
    return args, kwargs


def version_of(tensor: torch.Tensor) -> int:
    """Another number after each change in place; tensors of inference mode have none."""
    return 0 if tensor.is_inference() else tensor._version
