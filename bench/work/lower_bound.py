"""The least time that a training step can take: what its slowest resource needs alone."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from bench.harness.rounds import Rounds
from hetero.chunks.dtypes import Dtypes
from hetero.cli.job.options import TrainOptions

RESOURCES = ("compute", "link", "NVMe", "DRAM")


def dram_bytes(params: int, dtypes: Dtypes, accumulate: int, moved: Mapping[str, float]) -> float:
    """Bytes of RAM that a step reads and writes, without what forward and backward themselves do.

    Per parameter: what the update kernel counts (26 for AdamW in bf16); a gradient, read and
    written, for keeping the first micro-batch's, and three of them for adding each further one's;
    the norm's sums are taken on the way. Of what is moved, by "disk_read", "disk_write", "h2d" and
    "d2h": each byte of the disk once, of the link twice, since the emulated device's memory is RAM,
    too.
    """
    grads = 2 + 3 * (accumulate - 1)
    per_param = dtypes.update_bytes + grads * dtypes.grad_bytes
    disk = moved["disk_read"] + moved["disk_write"]
    return params * per_param + disk + 2 * (moved["h2d"] + moved["d2h"])


def summarize(rounds: Rounds, params: int, dtypes: Dtypes, options: TrainOptions) -> dict[str, Any]:
    """Medians over the rounds; the bound and the ratio are taken within each round."""
    seconds: dict[str, list[float]] = {part: [] for part in RESOURCES}
    touched: list[float] = []
    ratios: list[float] = []
    links = rounds.samples.get("link") or [{"gbps": 1.0}] * len(rounds.samples["hetero"])
    for step, compute, nvme, dram, link in zip(
        *(rounds.samples[name] for name in ("hetero", "compute", "NVMe", "DRAM")),
        links,
        strict=True,
    ):
        touched.append(dram_bytes(params, dtypes, options.accumulate, step))
        disk = step["disk_read"] + step["disk_write"]
        found = {
            "compute": compute["compute_s"],
            "link": max(step["h2d"], step["d2h"]) / (link["gbps"] * 1e9),
            "NVMe": disk / (nvme["gbps"] * 1e9),
            "DRAM": touched[-1] / (dram["gbps"] * 1e9),
        }
        for part in RESOURCES:
            seconds[part].append(found[part])
        ratios.append(step["step_s"] / max(found.values()))
    parts = {part: statistics.median(seconds[part]) for part in RESOURCES}

    def median(contender: str, *metrics: str) -> dict[str, float]:
        return {metric: rounds.median(contender, metric) for metric in metrics}

    phases = ("forward_s", "backward_s", "optimizer_s")
    return {
        "step_s": rounds.median("hetero", "step_s"),
        "phases_s": median("hetero", *phases),
        "bytes": {
            **median("hetero", "h2d", "d2h", "disk_read", "disk_write"),
            "dram": statistics.median(touched),
        },
        "gbps": {
            name: rounds.median(name, "gbps")
            for name in ("NVMe", "DRAM", "link")
            if name in rounds.samples
        },
        "compute_s": median("compute", "forward_s", "backward_s", "update_s", "compute_s"),
        "parts_s": parts,
        "bound": max(parts, key=parts.__getitem__),
        "bound_s": statistics.median(
            max(round_parts) for round_parts in zip(*seconds.values(), strict=True)
        ),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "ranges": {
            "step_s": rounds.spread("hetero", "step_s"),
            "compute_s": rounds.spread("compute", "compute_s"),
            "nvme_gbps": rounds.spread("NVMe", "gbps"),
        },
    }
