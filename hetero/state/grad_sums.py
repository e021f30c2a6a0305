"""Sums of squares of kept gradients, taken where a gradient is written if that can be.

So the norm for clipping costs no pass over the gradients, and no read of those in the file. A sum
is of the values as they are kept, after rounding. It takes a pass of its own, when it is asked for
or before the gradient leaves its slots, after writes of user code, for gradients that are not
contiguous or come from a device's memory, and in stage 1 where devices or replicas make most of the
mean. Sums are in double, in fixed lanes and blocks, so they depend on no layout. All micro-batches
are summed: which one is the last is not known when it comes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from hetero.state.managed_param import ManagedParam
from offload._native import add_and_sum, copy_and_sum, sum_of_squares

if TYPE_CHECKING:
    from offload._native import DtypeName

_NAMES: dict[torch.dtype, DtypeName] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


class GradSums:
    """The sums of squares of kept gradients, as their memory is now, as far as they are known.

    A sum belongs to one state of the memory. So memory is given out for writing only together with
    drop(), and is written with put() where possible, which knows the new sum.
    """

    def __init__(self, dtype: DtypeName) -> None:
        """Knows no sum. `dtype` is of what is kept."""
        self._dtype = dtype
        self._sums: dict[ManagedParam, float] = {}

    def __contains__(self, managed: ManagedParam) -> bool:
        return managed in self._sums

    def __getitem__(self, managed: ManagedParam) -> float:
        return self._sums[managed]

    def drop(self, members: Iterable[ManagedParam]) -> None:
        """Their memory is going to be written."""
        for m in members:
            self._sums.pop(m, None)

    def note(self, managed: ManagedParam, total: float) -> None:
        """The sum of what is kept now, which somebody else has taken."""
        self._sums[managed] = total

    def put(
        self, managed: ManagedParam, grad: torch.Tensor, kept: torch.Tensor, accumulate: bool
    ) -> None:
        """Copies `grad` to `kept`, or adds it there, with the bits of torch's copy_() and add_().

        If both are contiguous and in RAM, the sum is taken in the same pass over memory; else it
        is unknown afterwards.

        Args:
            grad: of any dtype, whole or this rank's shard, of the same shape as `kept`.
            kept: the memory of `managed`, of the dtype in which gradients are kept.
        """
        self._sums.pop(managed, None)
        if _is_plain(grad) and _is_plain(kept) and grad.shape == kept.shape:
            write = add_and_sum if accumulate else copy_and_sum
            source_dtype = _NAMES[grad.dtype]
            self._sums[managed] = write(
                source_dtype, grad.data_ptr(), self._dtype, kept.data_ptr(), kept.numel()
            )
        elif accumulate:
            kept.add_(grad)
        else:
            kept.copy_(grad)

    def take(self, managed: ManagedParam, address: int, numel: int) -> None:
        """Sums what is at `address` in RAM, by a pass over memory of its own."""
        self._sums[managed] = sum_of_squares(self._dtype, address, numel) if numel else 0.0


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its elements are in RAM, one after another, and have the values that they stand for.

    (A subclass may have no memory; a lazily negated tensor, or one of zeros, has other values.)
    """
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype in _NAMES
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
    )
