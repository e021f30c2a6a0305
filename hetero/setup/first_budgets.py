"""The budgets with which a model is built and placed, of all ranks together."""

from __future__ import annotations

from dataclasses import replace

from hetero.config import Config
from hetero.ranks.process_groups import ProcessGroups


class FirstBudgets:
    """The smallest of all ranks' budgets: with others their plans would differ.

    Attributes:
        host_bytes: of RAM.
        disk_bytes: of the scratch file; 0 without a directory.
        device_bytes: None unless DEVICE has memory of its own.
    """

    def __init__(self, config: Config, world: ProcessGroups, host_bytes: int) -> None:
        """All ranks of `world` call this; `host_bytes` are this one's."""

        def agreed(nbytes: int) -> int:
            return world.agree(nbytes, min, "budgets")

        follows = config.activation_memory is None and config.activation_limit == "auto"
        self._limits_activations = bool(world.agree(int(follows), max, "a limit"))
        self.host_bytes = agreed(host_bytes)
        self.disk_bytes = agreed(config.disk_bytes(world.local_ranks))
        device_bytes = config.device_share(world.local_ranks)
        self.device_bytes = None if device_bytes is None else agreed(device_bytes)

    def effective(self, config: Config) -> Config:
        """`config`, with the activations counted if the process of any rank has a limit: that is
        one of all ranks (BudgetMoves)."""
        return replace(config, activation_memory="auto") if self._limits_activations else config
