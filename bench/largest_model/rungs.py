"""What hetero trains within budgets for the whole process: the search, and each try's process."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.harness.peer_process import import_environment
from bench.largest_model.climb import climb
from bench.largest_model.limited_train import MARGIN_BYTES, Spec, outside_bytes
from bench.largest_model.shapes import Shape, family, params_of, shape_name
from hetero.cli.job.models import build_model, model_config
from hetero.cli.job.optimization import make_optimizer
from hetero.cli.job.options import TrainOptions
from hetero.config import Config
from hetero.planning.group_plans import arrange
from hetero.tiling.embeddings.tile_embeddings import tile_embeddings
from offload.disk.directories import free_bytes
from offload.errors import BudgetError
from offload.memory.sizes import format_bytes

# Bytes a parameter: fp32 until it finds its place, and bf16 parameter, gradient and optimizer
# state.
BUILDING_BYTES, TRAINING_BYTES = 4, 14
USUAL_STATE_BYTES = 16
DISK_SHARE = 0.95  # of what is free

# Limits count what is mapped and not touched, too: while a model is built its arenas are there
# whole, and its parameters still where they were. So a limit guards against what gets out of hand;
# what proves the budget is the peak of resident memory, which the kernel keeps.
LIMIT_PER_BUDGET = 2
ATTEMPTS = 3  # at one shape, each with less for the engine by what was too much

# glibc would keep blocks of up to 32 MiB in heaps of several threads, where what is freed between
# others stays resident: parameters that leave RAM while a model is built, gradients. Peers get the
# same.
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(4 << 20)}

RunChild = Callable[[Spec], dict[str, Any]]


class Rungs:
    """Finds and proves rungs; `run` trains what a Spec says, in a process of its own."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, run: RunChild) -> None:
        self._arguments = arguments
        self._run = run
        self._disk_bytes = int(free_bytes(str(folder)) * DISK_SHARE)
        # What the last peaks were above what had been reckoned; the next model begins with it.
        self._too_much_bytes = 0
        shapes = family(arguments.vocab_size, arguments.seq_len)
        held = self._disk_bytes / (BUILDING_BYTES + TRAINING_BYTES)
        most = held if arguments.most_params is None else arguments.most_params
        self.shapes = [c for c in shapes if params_of(c) <= min(most, held)]
        self._end = "disk" if held <= most else "--most-params"
        if len(self.shapes) == len(shapes):
            self._end = "the widest of shapes"
        if not self.shapes:
            raise ValueError(f"not even {params_of(shapes[0]):,} parameters: {self._end}")
        self._spec = Spec(
            model_config={},
            rss_bytes=0,
            nvme_path=str(folder),
            steps=arguments.steps,
            seq_len=arguments.seq_len,
            batch_size=arguments.batch_size,
            checkpointing=arguments.checkpointing,
        )
        tell("what the framework takes")
        small = Shape(1, 64).config(256, arguments.seq_len)
        found = run(replace(self._spec, model_config=small, rss_bytes=4 << 30, steps=1))
        if found["status"] != "trained":
            raise ValueError(f"the smallest of models does not train here: {found['error']}")
        self.framework_bytes = int(found["framework_bytes"])

    def all(self, budgets: Sequence[int]) -> Iterator[dict[str, Any]]:
        """The largest model of each budget, from the smallest budget on."""
        last: dict[str, Any] | None = None
        for budget in budgets:
            if last is not None and last["config"] == self.shapes[-1]:
                yield {**last, "budget_bytes": budget, "tries": []}
                continue
            at_least = 0 if last is None else self.shapes.index(last["config"])
            rung = self.rung(budget, at_least)
            if rung["status"] == "trained":
                last = rung
            yield rung

    def rung(self, budget: int, at_least: int = 0) -> dict[str, Any]:
        """The largest model that trains within `budget`, looked for from where the placement's
        smallest budgets say, but not below shape number `at_least`."""
        proven: dict[int, dict[str, Any]] = {}

        def trains(number: int) -> bool:
            tell(f"try {len(proven) + 1} of {self._arguments.tries}:")
            proven[number] = self.prove(self.shapes[number], budget)
            return bool(proven[number]["status"] == "trained")

        guess = max(self.guess(budget), at_least)
        best = climb(len(self.shapes), guess, trains, self._arguments.tries)
        tries = [
            {key: one.get(key) for key in ("shape", "params", "status", "error", "peak_rss_bytes",
                                           "seconds")}
            for one in proven.values()
        ]  # fmt: skip
        if best is None:
            return {"budget_bytes": budget, "status": "none", "tries": tries}
        return {**proven[best], "limited_by": self._limit(best, proven), "tries": tries}

    def guess(self, budget: int) -> int:
        """The largest shape's number for which the placement says that the budget is enough,
        beside the framework and what training takes otherwise."""

        def planned(number: int) -> bool:
            config = self.shapes[number]
            host = self._host_bytes(config, budget)
            return host > 0 and fits(config, host, self._disk_bytes, self._spec)

        found = climb(len(self.shapes), len(self.shapes) // 2, planned, len(self.shapes))
        return found or 0

    def only(self, model: str, budget: int) -> dict[str, Any]:
        """A model by name."""
        options = TrainOptions(
            model=model, vocab_size=self._arguments.vocab_size, seq_len=self._arguments.seq_len
        )
        config = model_config(options).to_diff_dict()
        if config.get("model_type") != "gpt2":
            raise ValueError(f"--model {model}: only GPT-2's shapes have a formula of memory here")
        return self.prove(config, budget)

    def beyond_ram(self, factor: float) -> dict[str, Any]:
        """The smallest shape whose usual state is `factor` times RAM."""
        ram = psutil.virtual_memory().total
        budget = self._arguments.only_rss or ram // 3
        least = factor * ram / USUAL_STATE_BYTES
        config = next((c for c in self.shapes if params_of(c) >= least), None)
        if config is None:
            need = (BUILDING_BYTES + TRAINING_BYTES) * least
            raise ValueError(
                f"--beyond-ram {factor}: no shape of {least / 1e9:.1f}G parameters is within the"
                f" {format_bytes(self._disk_bytes)} of disk that there are, of which it takes"
                f" {format_bytes(int(need))}, and within --most-params"
            )
        return {**self.prove(config, budget), "ram_bytes": ram, "factor": factor}

    def prove(self, config: dict[str, Any], budget: int) -> dict[str, Any]:
        """Trains it, with less for the engine each time the process took too much."""
        kind = self._arguments.limit
        limits = {} if kind == "none" else {kind: LIMIT_PER_BUDGET * budget}
        host = self._host_bytes(config, budget) if self._too_much_bytes else None
        if host is not None and host <= 0:
            host = None  # the process says what is missing
        spec = replace(
            self._spec, model_config=config, rss_bytes=budget, limits=limits, host_memory=host
        )
        begin_s = time.perf_counter()
        result: dict[str, Any] = {}
        for _ in range(ATTEMPTS):
            tell(f"{shape_name(config)}, {params_of(config):,} parameters in"
                  f" {format_bytes(budget)}")  # fmt: skip
            result = self._run(spec)
            over = int(result.get("peak_rss_bytes", 0)) - budget
            if result["status"] == "trained" and over <= 0:
                tell(f"  trained, peak {format_bytes(int(result['peak_rss_bytes']))}")
                break
            if result["status"] != "trained":
                tell(f"  {result['status']}: {result['error']}")
            if result["status"] == "refused" or "host_memory" not in result:
                break
            if result["status"] == "trained":
                error = f"the peak was {format_bytes(over)} above the budget"
                result |= {"status": "failed", "error": error}
                self._too_much_bytes += over
                tell(f"  {error}")
            less = max(over, 0) + MARGIN_BYTES
            spec = replace(spec, host_memory=int(result["host_memory"]) - less)
            if spec.host_memory is not None and spec.host_memory <= 0:
                break
        return {
            "budget_bytes": budget,
            "proven_at_bytes": budget,
            "seconds": time.perf_counter() - begin_s,
            "config": config,
            "shape": shape_name(config),
            "params": params_of(config),
            "state_bytes": USUAL_STATE_BYTES * params_of(config),
            **result,
        }

    def _host_bytes(self, config: dict[str, Any], budget: int) -> int:
        """What the budget leaves for the engine."""
        outside = outside_bytes(replace(self._spec, model_config=config)) + MARGIN_BYTES
        return budget - self.framework_bytes - outside - self._too_much_bytes

    def _limit(self, best: int, proven: dict[int, dict[str, Any]]) -> str:
        """Why no larger one than this was taken."""
        if best == len(self.shapes) - 1:
            return self._end
        next_one = proven.get(best + 1)
        if next_one is None:
            return "--tries"
        return "time" if next_one["status"] == "late" else "RAM"


def fits(config: dict[str, Any], host_bytes: int, disk_bytes: int, spec: Spec) -> bool:
    """Whether the placement finds room for the model, of which nothing is made."""
    from transformers import AutoConfig

    if host_bytes < 2 * 4 * int(config["n_embd"]) ** 2:  # a quick answer for most of what does not
        return False
    options = TrainOptions(policy="nvme", dtype=spec.dtype)
    with torch.device("meta"):
        model = build_model(AutoConfig.for_model(**config))
        tile_embeddings(model)
        made = Config(
            placement_policy="nvme",
            host_memory=host_bytes,
            nvme_path=spec.nvme_path,
            dtype=spec.dtype,
        )
        try:
            arrange(
                model, made, make_optimizer(options, model).dtypes(made), host_bytes, disk_bytes
            )
        except BudgetError:
            return False
    return True


def run_child(spec: Spec, arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    path = Path(folder) / "spec.json"
    spec.write(path)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "bench.largest_model.limited_train", str(path)],
            env={**os.environ, **import_environment(), **MALLOC},
            capture_output=True,
            text=True,
            timeout=arguments.timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        error = f"not done after {arguments.timeout:.0f} s: it does not fit in time"
        return {"status": "late", "error": error}
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        last = lines[-1] if lines else "it printed nothing"
        return {"status": "failed", "error": f"exit code {done.returncode}: {last}"}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def tell(text: str) -> None:
    """On stderr, at once."""
    print(f"bench.ladder: {text}", file=sys.stderr, flush=True)
