"""Dtypes by hetero's names, and values cast to one."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
NAMES = {dtype: name for name, dtype in TORCH.items()}


def cast(values: Any, dtype: torch.dtype | None) -> Any:
    """The values, however nested, with floating tensors in the dtype; None: as they are."""
    if dtype is None:
        return values
    return tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values
    )
