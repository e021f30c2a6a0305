"""This process among the others, as adapters ask for it: one rank without torch.distributed."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from hetero.ranks.process_groups import init_default_group, is_distributed

_LAUNCHED = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}  # what torchrun sets


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


def join(backend: str | None = None, **where: Any) -> None:
    """Makes the default process group of torchrun's ranks, of one alone, too, unless there is one.

    `backend` is gloo by default, which hetero needs; with NCCL gloo is added. `where` has arguments
    of torch.distributed.init_process_group(); without init_method one process that torchrun has
    not started gets no group.
    """
    is_launched = int(os.environ.get("WORLD_SIZE", "1")) > 1 or not _LAUNCHED - os.environ.keys()
    if is_distributed() or not (is_launched or "init_method" in where):
        return
    if backend in (None, "gloo") and not where:
        init_default_group()
    else:
        both = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend or "gloo"
        dist.init_process_group(both, **where)


def loader(data: Dataset[Any], shuffle: bool, seed: int = 0, **options: Any) -> DataLoader[Any]:
    """A loader of this rank's part of a dataset, which `seed` chooses alike on all ranks.

    `options` are those of torch.utils.data.DataLoader.
    """
    sampler: Any = None
    if ranks() > 1:
        sampler = DistributedSampler(data, ranks(), rank(), shuffle, seed)
    return DataLoader(data, shuffle=shuffle and sampler is None, sampler=sampler, **options)


def shard_mesh(shard_size: int | None, process_group: Any = None) -> DeviceMesh | None:
    """Replicas of `shard_size` ranks each; None for one group of all ranks.

    Raises ValueError if the ranks cannot be divided so, or a process group is given, too.
    """
    world = ranks()
    if shard_size is None or shard_size == world:
        return None
    if process_group is not None:
        raise ValueError("give a process group, or the number of ranks that shard, not both")
    if world % shard_size:
        raise ValueError(f"{world} ranks cannot be divided into groups of {shard_size}")
    return init_device_mesh("cpu", (world // shard_size, shard_size))
