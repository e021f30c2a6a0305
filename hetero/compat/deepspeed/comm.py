"""deepspeed.comm: joining the other ranks."""

from __future__ import annotations

from typing import Any

from hetero.compat.key_table import log_not_needed
from hetero.compat.ranks import join


def init_distributed(dist_backend: str | None = None, **options: Any) -> None:
    """Makes the default process group of torchrun's ranks, unless there is one.

    Args:
        dist_backend: of torch.distributed. Default: gloo; "nccl" adds gloo, which hetero needs.
        options: DeepSpeed's further ones, which torchrun's environment answers.
    """
    for name in options:
        log_not_needed(f"init_distributed: {name}", "torchrun's environment says it")
    join(dist_backend)
