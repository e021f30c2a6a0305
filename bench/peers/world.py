"""The ranks of a peer: processes on one machine that torch.distributed connects."""

from __future__ import annotations

import gc
import importlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def joined() -> Iterator[None]:
    """Connected, over gloo, with the ranks that the environment names.

    What uses the connection must not be referred to any more at the end: its threads end there, in
    order. Those that are left can abort the interpreter as it ends.
    """
    # Loaded by others later on, it would keep the connection in its functions' default arguments.
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        gc.collect()  # modules of DDP and FSDP are in reference cycles
        dist.destroy_process_group()


def rank() -> int:
    """This process's number from 0; 0 where there is no other."""
    return dist.get_rank() if dist.is_initialized() else 0


def gathered(values: list[float]) -> torch.Tensor:
    """Every rank's `values`, of the same number everywhere: float64[ranks, len(values)].

    Raises RuntimeError if a rank is gone.
    """
    mine = torch.tensor(values, dtype=torch.float64)
    if not dist.is_initialized():
        return mine[None]
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return torch.stack(found)
