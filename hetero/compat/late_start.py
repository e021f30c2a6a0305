"""initialize() of models whose options are complete only after they were built.

DeepSpeed's zero.Init and ColossalAI's ZeroInitContext say little of a training: its policy, dtype
and loss scale come later, with the model's wrapper and the optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hetero.api.optimizer import HybridOptimizer
from hetero.config import Config
from hetero.ranks.process_groups import is_distributed
from hetero.setup.construction import ConstructionArena
from hetero.setup.init_context import ZeroInitContext
from hetero.setup.initialize import construction_of, initialize, require_same_writes
from offload.errors import HeteroError

# Options that the construction arena has used when it was made.
_USED_OPTIONS = (
    *("backend", "link_gbps", "host_memory", "device_memory", "process_memory", "nvme_path"),
    *("allow_ram_filesystem", "nvme_capacity", "rank_timeout_s"),
)
# The process group and the mesh that a context was given: its model is initialized with the same.
_ranks: weakref.WeakKeyDictionary[ConstructionArena, dict[str, Any]] = weakref.WeakKeyDictionary()


class EarlyContext(ZeroInitContext):
    """A ZeroInitContext whose options may still change before initialize().

    In the block of another one it does nothing: the outer one takes all parameters.

    Args:
        config: what is known of the options.
        process_group, mesh: the ranks, as ZeroInitContext takes them.
        enabled: False: the block builds plain parameters.
        module: a model that was built already: its parameters are taken at once.
    """

    def __init__(
        self,
        config: Config,
        *,
        process_group: Any = None,
        mesh: Any = None,
        enabled: bool = True,
        module: torch.nn.Module | None = None,
    ) -> None:
        self._is_outermost = enabled and ZeroInitContext._active is None
        if not self._is_outermost:
            return
        ranks = {"process_group": process_group, "mesh": mesh}
        super().__init__(config, **ranks)
        _ranks[self.construction] = ranks
        if module is not None:
            with self:
                for param in module.parameters():
                    self.construction.adopt(param)

    def __enter__(self) -> EarlyContext:
        if self._is_outermost:
            super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._is_outermost:
            super().__exit__(*error)


def start(
    model: torch.nn.Module,
    optimizer: HybridOptimizer | Sequence[HybridOptimizer],
    config: Config,
    **ranks: Any,
) -> None:
    """hetero.initialize() with `config`, whatever options the model was built with.

    Options of memory and disk can only change while all of the model is in RAM.

    Args:
        model: built inside an EarlyContext, or outside.
        optimizer: as hetero.initialize() takes it.
        config: all options.
        ranks: process_group and mesh, as hetero.initialize() takes them. Those of the context hold
            for a model that was built in it, and others are refused.

    Raises:
        HeteroError: memory or disk would change, and parts of the model are on disk, or with other
            ranks, or its context was hetero.ZeroInitContext; or the context had other ranks.
        Exception: as hetero.initialize().
    """
    construction = construction_of(model)
    if construction is None:
        initialize(model, optimizer, config, **ranks)
        return
    early = _ranks.get(construction, {})
    all_ranks = dist.group.WORLD if is_distributed() else None
    for name, given in ranks.items():
        if given is not None and given != (early.get(name) or all_ranks):
            raise HeteroError(
                f"the model was built with another {name}; give it, or the configuration that has "
                f"it, to the context that builds the model"
            )
    new, old = ({**vars(c), **vars(c.debugging)} for c in (config, construction.config))
    others = [name for name in _USED_OPTIONS if new[name] != old[name]]
    if not others:
        construction.take_options(config)
        initialize(model, optimizer)
        return
    if construction.any_offloaded or construction not in _ranks:
        raise HeteroError(
            f"the model was built with other values of {', '.join(others)}, and parts of it may be "
            f"on disk, or with other ranks; give the configuration to the context that builds it"
        )
    require_same_writes(model, construction)
    construction.restore(model.parameters())
    construction.world.close()
    initialize(model, optimizer, config, **early)
