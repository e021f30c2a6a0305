"""What makes some ranks slower than others, as seconds of compute of each use on each rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.scaling.schedule import Schedule

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Stragglers:
    """Disturbances of compute; none by default.

    Attributes:
        jitter: standard deviation of each use on each rank, as a share of it; normally distributed,
            and never below zero.
        slower: by which share one rank is slower than the others, always.
        stall_s: for which one rank stands still once, in the middle of backward.
        seed: of the random numbers.
    """

    jitter: float = 0.0
    slower: float = 0.0
    stall_s: float = 0.0
    seed: int = 0

    def computing_s(self, schedule: Schedule) -> Seconds:
        """Seconds by use and rank. The slower rank is the first, the one that stalls the last."""
        alone = np.array([use.computing_s for use in schedule.uses])
        found = np.repeat(alone[:, None], schedule.ranks, axis=1)
        if self.jitter:
            random = np.random.default_rng(self.seed)
            found *= np.maximum(0.0, 1 + self.jitter * random.standard_normal(found.shape))
        found[:, 0] *= 1 + self.slower
        if len(found):
            found[len(found) * 3 // 4, -1] += self.stall_s
        return found
