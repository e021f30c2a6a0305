"""Rates of a training's own transfers and updates, from what is counted anyway.

So a step can be predicted, and what limits it be named, without `hetero profile`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

from hetero.activations.store import ActivationStore
from hetero.chunk_groups.chunk_group import ChunkGroup
from offload.device.backend import Backend
from offload.profile.machine_profile import Rates

_STEPS = 8  # the last ones that are looked at: a disk's speed changes within minutes


@dataclass(frozen=True)
class Counters:
    """Bytes that were moved and updated, and the seconds for which something was."""

    nvme_bytes: float = 0.0
    nvme_s: float = 0.0
    h2d_bytes: float = 0.0
    h2d_s: float = 0.0
    d2h_bytes: float = 0.0
    d2h_s: float = 0.0
    update_bytes: float = 0.0  # on the CPU, as UpdateKind.bytes_moved counts them
    update_s: float = 0.0

    def since(self, earlier: Counters, steps: int = 1) -> Counters:
        """What came after `earlier`, per step."""
        pairs = zip(astuple(self), astuple(earlier), strict=True)
        return Counters(*[(now - before) / steps for now, before in pairs])


def counters_of(
    chunk_groups: Sequence[ChunkGroup],
    backend: Backend,
    activations: ActivationStore | None = None,
) -> Counters:
    """What disks, pipelines and link have counted so far."""
    nvme_bytes = nvme_s = update_bytes = update_s = 0.0
    if activations is not None:
        nvme_bytes, nvme_s = float(sum(activations.own_io_bytes)), activations.own_io_s
    for chunk_group in chunk_groups:
        if chunk_group.disk is not None:
            disk = chunk_group.disk.io.stats
            nvme_bytes += disk["read_bytes"] + disk["written_bytes"]
            nvme_s += disk["busy_s"]
        tiles = sum(c.slots for c in chunk_group.layout.chunks if c.trainable)
        if tiles:
            updated = chunk_group.pipeline.stats
            numel = chunk_group.trained_numel / chunk_group.layout.shard.ranks
            dtypes = chunk_group.dtypes
            bytes_moved = numel * dtypes.update_bytes
            update_bytes += updated["tasks"] / len(dtypes.passes) / tiles * bytes_moved
            update_s += updated["compute_s"]
    h2d_s, d2h_s = backend.link_busy_s
    return Counters(
        nvme_bytes=nvme_bytes,
        nvme_s=nvme_s,
        h2d_bytes=backend.h2d_bytes,
        h2d_s=h2d_s,
        d2h_bytes=backend.d2h_bytes,
        d2h_s=d2h_s,
        update_bytes=update_bytes,
        update_s=update_s,
    )


class LearnedRates:
    """Means over the last steps of a training."""

    def __init__(
        self, counters: Callable[[], Counters], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`counters` says what was counted so far, `clock` the seconds."""
        self._counters = counters
        self._clock = clock
        # What was counted at the ends of steps. The first step after each start does things that no
        # other does, so it counts from its end on.
        self._ends: deque[tuple[Counters, float]] = deque(maxlen=_STEPS + 1)

    def restart(self) -> None:
        """Forgets all: homes have moved, which counts as no step and makes counters begin anew."""
        self._ends.clear()

    def end_step(self) -> None:
        """A step is over."""
        self._ends.append((self._counters(), self._clock()))

    @property
    def steps(self) -> int:
        """How many steps the means are of."""
        return max(0, len(self._ends) - 1)

    @property
    def step_s(self) -> float:
        """Seconds of a step; 0 before there was one."""
        return (self._ends[-1][1] - self._ends[0][1]) / self.steps if self.steps else 0.0

    @property
    def per_step(self) -> Counters:
        """Bytes and seconds of a step; all 0 before there was one."""
        if not self.steps:
            return Counters()
        return self._ends[-1][0].since(self._ends[0][0], self.steps)

    def rates(self, dtypes: Sequence[str], separate: bool) -> Rates | None:
        """What predictions take in the place of a profile; None if a rate is not known yet.

        A disk has one rate, that of its reads and writes as they were mixed, queues that ran dry
        included; updates have one for all `dtypes`, also on a DEVICE that is emulated. `separate`:
        DEVICE has memory of its own.
        """
        seen = self.per_step
        if not (seen.update_bytes and seen.update_s):
            return None
        if separate and not (seen.h2d_bytes and seen.h2d_s and seen.d2h_bytes and seen.d2h_s):
            return None
        update = seen.update_bytes / seen.update_s
        nvme = seen.nvme_bytes / seen.nvme_s if seen.nvme_bytes and seen.nvme_s else None
        return Rates(
            name="this training's own rates",
            dram_bytes_per_s=update,
            nvme_read_bytes_per_s=nvme,
            nvme_write_bytes_per_s=nvme,
            nvme_mixed_bytes_per_s=nvme,
            h2d_bytes_per_s=seen.h2d_bytes / seen.h2d_s if separate else None,
            d2h_bytes_per_s=seen.d2h_bytes / seen.d2h_s if separate else None,
            update_bytes_per_s=dict.fromkeys(dtypes, update),
            device_update_bytes_per_s=dict.fromkeys(dtypes, update) if separate else None,
        )
