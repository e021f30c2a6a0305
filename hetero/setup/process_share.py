"""The budgets before a step was seen, of which process_memory leaves a part for what steps need."""

from __future__ import annotations

from dataclasses import replace

from hetero.config import FIRST_STATE_SHARE, Config
from hetero.planning.placement import PlacementError
from hetero.planning.refusal import process_passed, process_too_small
from hetero.ranks.process_groups import ProcessGroups
from offload.memory.process_memory import margin_bytes, peak_resident_bytes, resident_bytes


class FirstBudgets:
    """The smallest of all ranks' budgets (with others their plans would differ), and what this
    process held before it had model state.

    Attributes:
        host_bytes: of RAM.
        first_host_bytes: of RAM until steps were seen, if that is enough: at most two thirds of
            what follows from process_memory.
        disk_bytes: of the scratch file; 0 without a directory.
        device_bytes: None unless DEVICE has memory of its own.
    """

    def __init__(self, config: Config, world: ProcessGroups) -> None:
        """Measures the process now; all ranks of `world` call this."""

        def agreed(nbytes: int) -> int:
            return world.agree(nbytes, min, "budgets")

        self._limit = config.process_bytes(world.local_ranks)
        self._is_auto = config.process_memory == "auto"
        self._beside_bytes = resident_bytes()
        self._peak_before = peak_resident_bytes()
        self._own_bytes = first_bytes = config.host_bytes(world.local_ranks, self._beside_bytes)
        if self._limit is not None:
            share_bytes = int((self._limit - self._beside_bytes) * FIRST_STATE_SHARE)
            first_bytes = max(1, min(self._own_bytes, share_bytes * 2 // 3))
        follows = config.activation_memory is None and config.activation_limit == "auto"
        self._limits_activations = bool(world.agree(int(follows), max, "a limit"))
        self.host_bytes = agreed(self._own_bytes)
        self.first_host_bytes = agreed(first_bytes)
        self.disk_bytes = agreed(config.disk_bytes(world.local_ranks))
        device_bytes = config.device_share(world.local_ranks)
        self.device_bytes = None if device_bytes is None else agreed(device_bytes)

    def effective(self, config: Config) -> Config:
        """`config`, with the activations counted if the process of any rank has a limit: that is
        one of all ranks (BudgetMoves)."""
        return replace(config, activation_memory="auto") if self._limits_activations else config

    def excess(self, soon_bytes: int) -> int:
        """By how many bytes the process is too large when `soon_bytes` more will be there."""
        if self._limit is None:
            return 0
        most = self._limit - margin_bytes(self._limit)
        return max(0, resident_bytes() + soon_bytes - most)

    def passed(self) -> str | None:
        """That the process has passed process_memory since this was made, if it has."""
        peak = peak_resident_bytes()
        if self._limit is None or peak <= max(self._limit, self._peak_before):
            return None
        return process_passed(self._limit, peak, "while the model was built and placed")

    def too_small(self, what: str, least: int) -> str | None:
        """Why `least` bytes of state do not fit, if the host budget follows from process_memory.

        `what` is the part of model state that takes them.
        """
        if self._limit is None:
            return None
        own = self._own_bytes
        return process_too_small(self._limit, self._is_auto, self._beside_bytes, own, what, least)

    def in_its_words(self, refusal: PlacementError) -> PlacementError:
        """A refusal to place the model, in words about process_memory if that is too small."""
        least = refusal.smallest_host_bytes
        why = self.too_small("the least placement of the model", least)
        if why is None or least <= self._own_bytes:
            return refusal
        return PlacementError(why, least, refusal.smallest_device_bytes)
