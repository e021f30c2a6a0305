"""This process among the others, as adapters ask for it: one rank without torch.distributed."""

from __future__ import annotations

import os

import torch.distributed as dist

from hetero.ranks.process_groups import is_distributed
from hetero.ranks.start.default_group import init_default_group


def rank() -> int:
    """The number of this rank in the world."""
    return dist.get_rank() if is_distributed() else 0


def ranks() -> int:
    """The number of ranks in the world."""
    return dist.get_world_size() if is_distributed() else 1


def barrier() -> None:
    """Waits for all ranks."""
    if is_distributed():
        dist.barrier()


_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets


def join(backend: str | None = None) -> None:
    """Makes the default process group of torchrun's ranks, of one alone, too, unless there is one.

    Idempotent.

    Args:
        backend: of torch.distributed. Default: gloo, which hetero needs; with NCCL gloo is added.
    """
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) < 2
    if is_distributed() or (is_alone and any(name not in os.environ for name in _LAUNCHED)):
        return
    if backend in (None, "gloo"):
        init_default_group()
    else:
        both = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
        dist.init_process_group(both)
