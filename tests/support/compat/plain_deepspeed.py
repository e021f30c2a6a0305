"""DeepSpeed's names in plain PyTorch, where all parameters are always there."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any


class zero:
    """deepspeed.zero."""

    @staticmethod
    def Init(**_: Any) -> Any:
        return nullcontext()

    @staticmethod
    def GatheredParameters(*_: Any, **__: Any) -> Any:
        return nullcontext()

    @staticmethod
    def register_external_parameter(*_: Any) -> None:
        return None
