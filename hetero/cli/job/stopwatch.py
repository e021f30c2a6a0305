"""Wall-clock time of a step and of its parts."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offload import timeline


class Stopwatch:
    """Starts when made; `span(name)` adds the time of its block to `seconds[name]`.

    On a GPU the work of a block is over only when the device is idle, so it is waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._start_s = self._now_s()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start_s = self._now_s()
        yield
        end_s = self._now_s()
        self.seconds[name] += end_s - start_s
        timeline.note("compute", start_s, end_s, name=name)

    def total_s(self) -> float:
        return self._now_s() - self._start_s

    def _now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
