"""What torch computes, as uses of memory in the fake device's current stream.

Compute on the fake device is done at once, and copies as late as they may, so a copy that
overwrites what compute still reads would change no bit. Its order shows it nevertheless: each
operator's arguments are read, or written, and its results written, in the current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hetero.stand_ins.offloaded_tensor import OffloadedTensor
from tests.support.native.fake_cuda import FakeRuntime

Ranges = list[tuple[int, int]]  # addresses and bytes


@cache
def _arguments(func: Any) -> list[tuple[str, bool]] | None:
    """Names, and whether the operator writes to them; None if it makes a view."""
    schema = func._schema
    if schema.name == "aten::set_":  # which makes the tensor one
        return None
    if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
        return None
    aliases = ((each.name, each.alias_info) for each in schema.arguments)
    return [(name, alias is not None and alias.is_write) for name, alias in aliases]


class Watch(TorchDispatchMode):
    """Inside, torch's operators in this thread are uses of the device's memory.

    Where that is RAM, all of it is meant but what is page-locked.
    """

    def __init__(self, runtime: FakeRuntime) -> None:
        super().__init__()
        self._runtime = runtime
        self.seen = 0  # operators

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled, and torch's way around its compiler takes as long as the rest."""
        return False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        runtime = self._runtime
        arguments = None if runtime.is_on_device else _arguments(func)
        if arguments is None:
            return func(*args, **given)
        reads: Ranges = []
        writes: Ranges = []
        named = [given.get(name) for name, _ in arguments[len(args) :]]
        for (_, is_written), value in zip(arguments, [*args, *named], strict=True):
            (writes if is_written else reads).extend(self._ranges(value))
        found = func(*args, **given)
        writes += self._ranges(found)
        with runtime.lock:
            stream = runtime.current_stream()
            runtime.order.use(stream, reads, writes=False)
            runtime.order.use(stream, writes, writes=True)
        self.seen += 1
        return found

    def _ranges(self, value: object) -> Ranges:
        """The memory of the tensors in `value`, without gaps where they are dense."""
        if isinstance(value, torch.Tensor):
            if (
                value.device.type != self._runtime.device.type
                or value.numel() == 0
                or isinstance(value, OffloadedTensor)
            ):
                return []
            begin = value.data_ptr()
            if begin == 0:
                return []
            for address, nbytes in self._runtime.page_locked.items():
                if address <= begin < address + nbytes:
                    return []
            if value.is_contiguous():
                return [(begin, value.nbytes)]
            span = sum((n - 1) * abs(s) for n, s in zip(value.shape, value.stride(), strict=True))
            return [(begin, (span + 1) * value.element_size())]
        # (A storage can be iterated over too, byte by byte.)
        if isinstance(value, (list, tuple)):
            return [found for each in value for found in self._ranges(each)]
        return []
