"""What a training's first call does to its process: it joins the other ranks and shares the CPUs.

Both are visible to the whole process, so they happen in ZeroInitContext(...) and initialize(), and
in nothing that those make.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hetero.config import Config
from hetero.cpu_threads import share_threads
from hetero.ranks.process_groups import (
    ProcessGroups,
    init_default_group,
    is_distributed,
    tell_absence,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def join_ranks(
    make_config: Callable[[], Config], process_group: Any = None, mesh: DeviceMesh | None = None
) -> tuple[Config, ProcessGroups]:
    """The ranks that train one model together, this process among them. All of them must call it.

    A process that torchrun started gets torch.distributed's default process group (gloo) if it has
    none yet, because it must not train a model of its own by mistake; a training that needs another
    backend calls torch.distributed.init_process_group() first. The process's threads for optimizer
    updates become its share of the machine's CPUs, unless hetero.set_threads() has chosen.

    Args:
        make_config: makes the options; what it raises the other ranks are told.
        process_group, mesh: the ranks, as ProcessGroups takes them.

    Returns:
        The options, and the ranks.

    Raises ValueError as ProcessGroups does, and what `make_config` raises.
    """
    if not is_distributed() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        init_default_group()
    try:
        config = make_config()
    except BaseException as error:  # other ranks wait for this one
        if is_distributed():
            tell_absence(process_group, mesh, error)
        raise
    world = ProcessGroups(config.rank_timeout_s, process_group, mesh)
    share_threads(world.local_ranks)
    return config, world
