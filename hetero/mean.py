"""The mean of gradients of several ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_BLOCK_NUMEL = 1 << 18  # of the fp32 sum at a time: it stays in the cache


def mean_into(target: torch.Tensor, parts: Sequence[torch.Tensor], count: int) -> None:
    """Writes sum(parts) / count to `target`, which may be one of them; all flat, of one length.

    The sum is made in fp32, in the order of `parts`, and rounded once, at the end: so it depends on
    no network, and fp16 gradients do not overflow on the way to their mean.
    """
    scratch = torch.empty(min(_BLOCK_NUMEL, target.numel()), dtype=torch.float32)
    for begin in range(0, target.numel(), _BLOCK_NUMEL):
        block = slice(begin, min(begin + _BLOCK_NUMEL, target.numel()))
        total = scratch[: block.stop - block.start]
        total.copy_(parts[0][block])
        for part in parts[1:]:
            total.add_(part[block])
        target[block] = total.div_(count)
