"""What a training's first call does to its process: it joins the other ranks and shares the CPUs.

Both are visible to the whole process, so they happen in ZeroInitContext(...) and initialize(), and
in nothing that those make.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hetero.config import Config
from hetero.cpu_threads import share_threads
from hetero.ranks.process_groups import ProcessGroups, is_distributed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def join_ranks(
    config: Config, process_group: Any = None, mesh: DeviceMesh | None = None
) -> ProcessGroups:
    """The ranks that train one model together, this process among them. All of them must call it.

    A process that torchrun started gets torch.distributed's default process group (gloo) if it has
    none yet, because it must not train a model of its own by mistake; a training that needs another
    backend calls torch.distributed.init_process_group() first. The process's threads for optimizer
    updates become its share of the machine's CPUs, unless hetero.set_threads() has chosen.

    Raises ValueError as ProcessGroups, which has the arguments, does.
    """
    if not is_distributed() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Loaded after the group is there, it would keep the group's threads past its end.
        import torch.distributed.nn.functional  # noqa: F401

        dist.init_process_group("gloo")
    world = ProcessGroups(config.rank_timeout_s, process_group, mesh)
    share_threads(world.local_ranks)
    return world
