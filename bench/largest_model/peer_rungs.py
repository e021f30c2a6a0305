"""What DeepSpeed's ZeRO-3, parameters and optimizer on NVMe, trains within budgets."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness.contenders import peer_contenders, run_contender
from bench.largest_model.rungs import MALLOC, tell
from bench.largest_model.shapes import params_of, shape_name
from bench.train import write_workload
from hetero.cli.job.options import TrainOptions
from offload.memory.sizes import format_bytes

# Where to look first; what is measured then decides.
FLOOR_BYTES, BYTES_PER_PARAM = 1 << 30, 8


class MissingPeer(Exception):
    """There is no DeepSpeed, or it does not start; the message says how to get it."""


class PeerRungs:
    """Its runs, each of which is good for all budgets."""

    def __init__(
        self, arguments: argparse.Namespace, folder: Path, shapes: Sequence[dict[str, Any]]
    ) -> None:
        self._arguments = arguments
        self._folder = folder
        self._shapes = shapes
        self._runs: dict[int, dict[str, Any]] = {}

    @property
    def runs(self) -> list[dict[str, Any]]:
        """All that were made, the smallest first."""
        return [self._runs[number] for number in sorted(self._runs)]

    def rung(self, budget: int) -> dict[str, Any] | None:
        """The largest run whose peak is within `budget`. Raises MissingPeer."""
        tries = self._arguments.tries
        for _ in range(tries):
            low, high = self._between(budget)
            if high - low <= 1:
                break
            number = min(max(self._guess(budget), low + 1), high - 1)
            tell(f"DeepSpeed within {format_bytes(budget)}, at most {tries} tries:")
            self._runs[number] = self._run(self._shapes[number])
        best = self._between(budget)[0]
        return self._runs[best] if best >= 0 else None

    def _between(self, budget: int) -> tuple[int, int]:
        """The largest shape's number that is known to work, and the smallest that is not to."""
        works = {
            n: _trained(run) and run["peak_rss_bytes"] <= budget for n, run in self._runs.items()
        }
        high = min((n for n, does in works.items() if not does), default=len(self._shapes))
        return max((n for n, does in works.items() if does and n < high), default=-1), high

    def _guess(self, budget: int) -> int:
        """By a line through the runs whose peaks are nearest, or of BYTES_PER_PARAM."""
        trained = sorted(
            (abs(run["peak_rss_bytes"] - budget), run["peak_rss_bytes"], run["params"])
            for run in self._runs.values()
            if _trained(run)
        )
        _, bytes_at, params_at = trained[0] if trained else (0, FLOOR_BYTES, 0)
        bytes_per_param = float(BYTES_PER_PARAM)
        if len(trained) > 1:
            _, other_bytes, other_params = trained[1]
            slope = (other_bytes - bytes_at) / (other_params - params_at)
            bytes_per_param = slope if slope > 0 else bytes_per_param
        most: float = params_at + (budget - bytes_at) / bytes_per_param
        return sum(params_of(config) <= most for config in self._shapes) - 1

    def _run(self, config: dict[str, Any]) -> dict[str, Any]:
        arguments, folder = self._arguments, self._folder
        tell(f"  {shape_name(config)}, {params_of(config):,} parameters")
        config_path = folder / "model.json"
        config_path.write_text(json.dumps(config))
        options = TrainOptions(
            config=str(config_path),
            steps=arguments.steps,
            seq_len=arguments.seq_len,
            batch_size=arguments.batch_size,
            warmup=0,
            save_model=False,
        )
        workload = folder / "workload.json"
        write_workload(options, workload, lean=arguments.checkpointing)
        contender = next(
            c
            for c in peer_contenders("deepspeed", workload, folder, arguments.peer_python)
            if c.name == "deepspeed nvme"
        )
        begin_s = time.perf_counter()
        outcome = run_contender(contender, arguments.timeout, MALLOC)
        run: dict[str, Any] = {
            "shape": shape_name(config),
            "params": params_of(config),
            "seconds": time.perf_counter() - begin_s,
        }
        if outcome.status == "missing":
            raise MissingPeer(outcome.error)
        if outcome.status != "finished":
            status = "late" if outcome.late else "failed"
            error = f"{outcome.error}{': it does not fit in time' if outcome.late else ''}"
            tell(f"  {status}: {error}")
            return {**run, "status": status, "error": error}
        peak = max(outcome.figures["peak_rss_by_rank_bytes"])
        tell(f"  trained, peak {format_bytes(peak)}")
        step_s = outcome.figures["step_s"]
        return {**run, "status": "trained", "error": None, "peak_rss_bytes": peak, "step_s": step_s}


def _trained(run: dict[str, Any]) -> bool:
    return bool(run["status"] == "trained")
