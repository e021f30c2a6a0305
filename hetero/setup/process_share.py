"""The part of process_memory that model state gets before a step was seen."""

from __future__ import annotations

from hetero.config import FIRST_STATE_SHARE, Config
from hetero.planning.placement import PlacementError
from hetero.planning.refusal import process_too_small
from offload.memory.process_memory import resident_bytes


class ProcessShare:
    """What the process holds before it has model state, and what follows for the host budget."""

    def __init__(self, config: Config, local_ranks: int) -> None:
        """Measures the process now; `local_ranks` share the machine."""
        self._limit = config.process_bytes(local_ranks)
        self._is_auto = config.process_memory == "auto"
        self._beside_bytes = resident_bytes()
        self.host_bytes = config.host_bytes(local_ranks, self._beside_bytes)

    def first_host_bytes(self, host_bytes: int) -> tuple[int, ...]:
        """What model state and activations get of `host_bytes` until steps were seen: two thirds
        where that follows from process_memory, all if that is not enough."""
        if self._limit is None:
            return (host_bytes,)
        return host_bytes * 2 // 3, host_bytes

    def too_small(self, what: str, least: int) -> str | None:
        """Why `least` bytes of state do not fit, if the host budget follows from process_memory.

        `what` is the part of model state that takes them.
        """
        if self._limit is None:
            return None
        share = int((self._limit - self._beside_bytes) * FIRST_STATE_SHARE)
        if self.host_bytes < share:  # host_memory, or its default, is what limits it
            return None
        return process_too_small(self._limit, self._is_auto, self._beside_bytes, what, least)

    def in_its_words(self, refusal: PlacementError) -> PlacementError:
        """A refusal to place the model, in words about process_memory if that is too small."""
        least = refusal.smallest_host_bytes
        why = self.too_small("the least placement of the model", least)
        if why is None or least <= self.host_bytes:
            return refusal
        return PlacementError(why, least, refusal.smallest_device_bytes)
