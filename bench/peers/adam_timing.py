"""How an update is timed in bench.adam: the same for hetero's and for every peer's."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def timed_rate(update: Callable[[], Any], numel: int, repeats: int) -> dict[str, float]:
    """{"params_per_s"} over `repeats` updates, after one that wakes threads and faults pages in."""
    update()
    begin_s = time.perf_counter()
    for _ in range(repeats):
        update()
    return {"params_per_s": numel * repeats / (time.perf_counter() - begin_s)}


def huge_page_share() -> float:
    """How much of this process's anonymous memory is in transparent huge pages, from 0 to 1."""
    amounts = {"AnonHugePages": 0, "Anonymous": 0}
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    for line in lines:
        name, _, rest = line.partition(":")
        if name in amounts:
            amounts[name] = int(rest.split()[0])
    return amounts["AnonHugePages"] / max(amounts["Anonymous"], 1)
