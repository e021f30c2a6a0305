"""deepspeed.comm: torch.distributed, and joining the other ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed

from hetero.compat.key_table import log_given
from hetero.compat.ranks import join


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Makes torch.distributed's default process group, unless there is one.

    Args:
        dist_backend: of torch.distributed. Default: gloo; "nccl" adds gloo, which hetero needs.
        timeout: of the group.
        init_method, rank, world_size: where ranks meet. Default: torchrun's environment says it;
            without one there is no group.
        dist_init_required: False: no group is made.
        auto_mpi_discovery, distributed_port, verbose, config: not needed.
    """
    log_given(
        "init_distributed",
        "torchrun's environment says it",
        auto_mpi_discovery=not auto_mpi_discovery,
        distributed_port=distributed_port != 29500,
        config=config,
    )
    if dist_init_required is False:
        return
    where: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if init_method is not None:
        where |= {"init_method": init_method, "rank": rank, "world_size": world_size}
    join(dist_backend, **where)


def __getattr__(name: str) -> Any:
    """All other names are those of torch.distributed."""
    if name.startswith("__") or not hasattr(torch.distributed, name):
        raise AttributeError(f"deepspeed.comm: torch.distributed has no {name!r}")
    return getattr(torch.distributed, name)
