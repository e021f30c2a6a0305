"""deepspeed.checkpointing: activation checkpoints, which are torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from hetero.compat.key_table import log_not_needed

_configured = False


def configure(mpu_: Any = None, deepspeed_config: Any = None, **options: Any) -> None:
    """Accepts DeepSpeed's options, none of which is needed; each is logged once."""
    global _configured
    given = {"mpu_": mpu_, "deepspeed_config": deepspeed_config, **options}
    for name, value in given.items():
        if value not in (None, False):
            log_not_needed(f"checkpointing.configure: {name}", "initialize() reads options")
    _configured = True


def is_configured() -> bool:
    """Whether configure() was called."""
    return _configured


def reset() -> None:
    """Does nothing: no buffers are kept between steps."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Calls the function without keeping its activations; backward computes them again."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)
