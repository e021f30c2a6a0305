"""OneFlow's names: `from hetero.compat import oneflow as flow`, for `import oneflow as flow`."""

from typing import Any

import torch

from hetero.compat.oneflow import nn, optim
from hetero.compat.oneflow.global_view import Tensor, making, placement, sbp

__all__ = ["Tensor", "nn", "optim", "placement", "sbp"]

_MAKERS = (
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
)


def __getattr__(name: str) -> Any:
    """torch's; what makes tensors makes such as may be made global."""
    found = getattr(torch, name)
    return making(found) if name in _MAKERS else found
