"""Device meshes from the sizes that other projects' options give."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hetero.compat.ranks import ranks


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
