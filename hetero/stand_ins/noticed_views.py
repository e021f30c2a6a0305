"""Views in a graph of a copy of a parameter: a write through `.data` of one is noticed."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from hetero.stand_ins.parameter_classes import AbsentParameter, PresentParameter, has_absent_param


class NoticedView(torch.Tensor):
    """A view, made while autograd recorded it, of a parameter that was a copy then.

    What is written to it is lost, and counted in the parameter's version, which its next use looks
    at. `.data` of a plain tensor has a version of its own; this one's shares the parameter's.
    """

    @property
    def data(self) -> torch.Tensor:
        """The values, without gradient."""
        return torch.Tensor.detach(self)

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        with torch.no_grad():
            self.copy_(values)

    def __format__(self, spec: str) -> str:
        with torch._C.DisableTorchFunctionSubclass():  # torch formats the numbers of plain tensors
            return format(self.as_subclass(torch.Tensor), spec)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if has_absent_param(args, kwargs):
            return AbsentParameter.__torch_function__(func, types, args, kwargs)
        return with_noticed_writes(
            torch._C._disabled_torch_function_impl(func, types, args, kwargs)
        )


def with_noticed_writes(result: Any) -> Any:
    """The result of a torch function, in which views of parameters are NoticedViews."""
    return tree_map_only(torch.Tensor, _noticed, result)


def _noticed(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is torch.Tensor and isinstance(tensor._base, PresentParameter):
        tensor.__class__ = NoticedView
    return tensor
