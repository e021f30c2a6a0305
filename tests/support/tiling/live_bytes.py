"""The memory of tensors, counted operator by operator."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Inside the block: the storages that operators have made, as far as they are alive.

    `peak` is the largest sum of their bytes after an operator, `largest` the largest of them all.
    What was there before is not counted, nor what an operator holds while it runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.largest = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._before: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = {_key(each) for each in tree_iter((args, kwargs)) if _has_memory(each)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if _has_memory(tensor) and _key(tensor) not in given:
                storage = tensor.untyped_storage()
                self._live[_key(tensor)] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: kept for key, kept in self._live.items() if not kept[0].expired()}
        sizes = [nbytes for _, nbytes in self._live.values()]
        self.peak = max(self.peak, sum(sizes))
        self.largest = max([self.largest, *sizes])
        return result


def _has_memory(value: object) -> bool:
    """Whether it is a plain tensor with a storage."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and not value.is_meta  # type: ignore[attr-defined]
        and value.layout is torch.strided  # type: ignore[attr-defined]
    )


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
