"""deepspeed.checkpointing: activation checkpoints, which are torch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.utils.checkpoint

from hetero.compat.key_table import log_given

_configured: list[object] = []
# Calls a function without keeping its activations; backward computes them again.
checkpoint: Callable[..., Any] = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)


def configure(mpu_: Any = None, deepspeed_config: Any = None, **options: Any) -> None:
    """Accepts DeepSpeed's options, none of which is needed; each is logged once."""
    given = {"mpu_": mpu_, "deepspeed_config": deepspeed_config, **options}
    log_given("checkpointing.configure", "initialize() reads options", **given)
    _configured.append(given)


def is_configured() -> bool:
    """Whether configure() was called."""
    return bool(_configured)


def reset() -> None:
    """Does nothing: no buffers are kept between steps."""
