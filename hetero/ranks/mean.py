"""The mean of gradients of several ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero.chunks.dtypes import check_dtype
from offload import _native


def mean_into(target: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Writes the mean of the flat `parts` to `target`, which may be one of them.

    The sum is made in fp32, in the order of `parts`, and rounded once, at the end: so it depends on
    no network, and fp16 gradients do not overflow on the way to their mean.
    """
    dtype = check_dtype(str(target.dtype), "dtype")
    addresses = [part.data_ptr() for part in parts]
    _native.mean(dtype, addresses, target.data_ptr(), target.numel())
