"""Parameters used outside the module that owns them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.overrides import TorchFunctionMode

from hetero.runtime.modules.all_params import AllParams
from hetero.runtime.modules.call_stack import EnteredCalls

_Tensor: Any = torch.Tensor  # its descriptors are not what its stubs say

# What does not need a parameter's value: its stand-in has the metadata, and can be replaced.
_VALUE_FREE = {
    _Tensor.data.__set__,
    _Tensor.device.__get__,
    _Tensor.dtype.__get__,
    _Tensor.grad.__get__,
    _Tensor.grad.__set__,
    _Tensor.grad_fn.__get__,
    _Tensor.is_cuda.__get__,
    _Tensor.is_leaf.__get__,
    _Tensor.is_meta.__get__,
    _Tensor.is_sparse.__get__,
    _Tensor.layout.__get__,
    _Tensor.ndim.__get__,
    _Tensor.requires_grad.__get__,
    _Tensor.shape.__get__,
    _Tensor.dim,
    _Tensor.is_floating_point,
    _Tensor.nelement,
    _Tensor.numel,
    _Tensor.size,
    torch.is_floating_point,
    torch.numel,
}


class UsesOutsideOwner(TorchFunctionMode):
    """When a torch function is given an offloaded parameter, gathers it for that call.

    Hooks on the owner cannot see these uses: MultiheadAttention uses its projection's weight, a
    language model's head the embedding's.
    """

    def __init__(self, params: AllParams, calls: EnteredCalls) -> None:
        """A mode for one thread; `calls` are the forwards of all threads, because what one
        acquired may go while another uses it.
        """
        super().__init__()
        self._params = params
        self._calls = calls

    @_disable_dynamo  # torch.compile must not trace into what moves parameters
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _VALUE_FREE:
            return func(*args, **kwargs)
        known = map(self._params.known, _parameters((*args, *kwargs.values())))
        needed = [
            managed
            for managed in known
            if managed is not None and (managed.uses == 0 or self._calls.threads > 1)
        ]
        if not needed:
            return func(*args, **kwargs)
        with self._params.present(needed):
            return func(*args, **kwargs)


def _parameters(values: Iterable[Any]) -> Iterator[torch.nn.Parameter]:
    """Parameters among the values and inside lists and tuples of them."""
    for value in values:
        if isinstance(value, torch.nn.Parameter):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _parameters(value)
