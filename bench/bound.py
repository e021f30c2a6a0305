"""A training step beside the time that its slowest resource needs at least.

usage: python -m bench.bound [options of `hetero train`] [--models gpt2-medium,gpt2-1.3b]
                             [--settings nvme,emulated] [--clipped 0,10,50,100]
                             [--json]

The bound of a step is the largest of four times, all measured in the same rounds as the step:

  compute  forward and backward of the model in plain torch, in memory and in the same dtype, plus
           hetero's update kernel on all parameters, in RAM; the CPU does all of these, so they are
           added (bench/work/compute_alone.py)
  link     bytes to or from the emulated device, whichever takes longer, at what a link of
           --link-gbps moves alone
  NVMe     bytes read and written, at what the same I/O engine moves alone when it reads and writes
           in the step's proportion
  DRAM     bytes that update, kept gradients, the disk's and the link's copies touch in RAM
           (see dram_bytes()), at the rate of a kernel that does next to nothing else

What is updated during backward is updated once more if the step turns out to be clipped, so the
share of steps that are matters: --clipped gives each of its shares, whatever the gradients' norms.

A round measures some steps in a row, after one that is not counted, so that each begins as in a
long training: while the step before is still being written. Ratios are taken within a round and
their median given. (`hetero train --timeline FILE` draws such steps.)
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psutil

from bench.harness.program import Kind, Program, list_of, names, options
from bench.harness.rounds import Sample, run_rounds
from bench.harness.tables import Column, middle, number, of_figures, ranged, size
from bench.work.bandwidths import disk_alone, link_alone, memory_alone
from bench.work.compute_alone import ComputeAlone, resident_bytes
from bench.work.job_steps import JobSteps
from hetero.chunks.dtypes import Dtypes
from hetero.job.job import Job, open_job
from hetero.job.models import (
    count_parameters,
    model_config,
    model_label,
    wanted_vocab_size,
)
from hetero.job.options import TrainOptions, add_train_arguments
from hetero.job.run_folder import RunFolder
from offload.errors import HeteroError

GOAL = 1.15
POLICIES = {"nvme": "nvme", "emulated": "auto"}
SETTINGS = tuple(POLICIES)
MODELS = "gpt2-medium,gpt2-1.3b"
DEFAULTS = {
    "model": None,
    "seq_len": 256,
    "batch_size": 1,
    "steps": 3,
    "lr": 1e-4,
    "warmup": 0,
    "schedule": "constant",
    "policy": None,
    "backend": "cpu",
    "link_gbps": 8.0,
    "save_model": False,
}
USUAL_STATE_BYTES = 16  # per parameter
HOST_SHARE, DEVICE_SHARE = 1 / 3, 1 / 8  # of that, by default

RESOURCES = ("compute", "link", "NVMe", "DRAM")


@dataclass(frozen=True)
class Case:
    """One model in one setting."""

    name: str
    options: TrainOptions
    clipped: float  # share of the steps

    @property
    def steps(self) -> int:
        """Of a sample: as many as --steps, or so many more that the share comes out."""
        rarer = min(self.clipped, 1 - self.clipped)
        return max(self.options.steps, round(1 / rarer) if rarer else 1)


def _percentage(option: str, text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 100:
        raise ValueError(f"{option} must be percentages such as 0,50,100, got {text!r}")
    return found


OPTIONS = options(
    """
    --models    TEXT      gpt2-medium,gpt2-1.3b  names, where neither --model nor --config is given
    --settings  NAMES     nvme,emulated          nvme: policy nvme, computing in RAM; emulated:
                          policy auto, on an emulated device behind a link; budgets that are not
                          given are a third of 16 bytes a parameter of RAM, and an eighth of the
                          device
    --clipped   PERCENTS  0,10,50,100            of the steps that are clipped
    --rounds    N         3                      of --steps steps in a row each, after one of
                          warm-up
    --compute   NAME      auto                   how compute alone is measured: with the whole
                          model, or from some of its layers; auto: whole where RAM holds it beside
                          --host-memory
    --io-size   SIZE      1GiB                   of the file on which the disk alone is measured
    """,
    settings=SETTINGS,
    clipped=list_of(Kind("PERCENT", _percentage)),
    compute=("auto", "whole", "layers"),
)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of all cases. Raises ValueError for options that cannot work."""
    if arguments.backend != "cpu":
        raise ValueError("--backend follows from --settings; leave it out")
    if arguments.timeline is not None:
        raise ValueError("--timeline is of `hetero train`; leave it out")
    given = arguments.nvme_path[0] if arguments.nvme_path else None
    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="hetero-bound-", dir=given)
        folder = stack.enter_context(temporary)
        disk = stack.enter_context(disk_alone(given or folder, arguments.io_size))
        found = [_case(case, arguments, folder, disk) for case in _cases(arguments)]
    return {
        "cases": found,
        "goal": GOAL,
        "within_goal": sum(
            case["status"] == "measured" and middle(case["contenders"]["hetero"]["ratio"]) <= GOAL
            for case in found
        ),
    }


def _cases(arguments: argparse.Namespace) -> Iterator[Case]:
    models = names(arguments.models)
    if arguments.model is not None or arguments.config is not None:
        models = [arguments.model or TrainOptions.model]
    for model in models:
        for setting in arguments.settings:
            own = argparse.Namespace(**vars(arguments))
            own.model = model
            own.vocab_size = wanted_vocab_size(model, own.config, own.vocab_size)
            own.policy = own.policy or POLICIES[setting]
            if setting != "emulated":
                own.device_memory = own.link_gbps = None
            options = TrainOptions.from_namespace(own)
            usual = USUAL_STATE_BYTES * count_parameters(model_config(options))
            if options.host_memory is None:
                options = replace(options, host_memory=str(int(usual * HOST_SHARE)))
            if setting == "emulated":
                device = options.device_memory or str(int(usual * DEVICE_SHARE))
                options = replace(options, backend="emulated", device_memory=device)
            for percent in arguments.clipped:
                name = f"{model_label(options)} {setting}, {percent:g} % clipped"
                yield Case(name, options, percent / 100)


def _case(
    case: Case,
    arguments: argparse.Namespace,
    folder: str,
    disk: Callable[[float], Sample],
) -> dict[str, Any]:
    """One case's figures; those of its refusal if its budgets cannot work."""
    print(f"bench.bound: {case.name}", file=sys.stderr, flush=True)
    about = {"name": case.name, "options": case.options.as_dict()}
    try:
        with RunFolder(folder) as run_folder, open_job(case.options, run_folder) as job:
            result = _measure(case, job, disk, arguments)
    except HeteroError as error:
        return {**about, "status": "refused", "reason": str(error)}
    return {**about, "status": "measured", **result}


def _measure(
    case: Case, job: Job, disk: Callable[[float], Sample], arguments: argparse.Namespace
) -> dict[str, Any]:
    dtypes: Dtypes = job.engine.chunk_groups[0].dtypes
    steps = JobSteps(job, case.clipped)
    whole = arguments.compute == "whole"
    if arguments.compute == "auto":
        # The engine has not touched most of its budgets yet.
        budgets = (job.setting.budget_bytes[tier] or 0 for tier in ("host", "device"))
        left = psutil.virtual_memory().available - sum(budgets)
        whole = resident_bytes(job.setting.params, dtypes) < left * 0.7
    alone = ComputeAlone(case.options, dtypes, whole)
    contenders: dict[str, Callable[[], Sample]] = {
        "hetero": partial(steps.sample, case.steps),
        "compute": partial(alone.sample, arguments.steps),
        "NVMe": lambda: disk(steps.read_share),
        "DRAM": memory_alone(),
    }
    if case.options.backend == "emulated":
        contenders["link"] = link_alone(case.options.link_gbps or 0)
    try:
        steps.warm_up()
        rounds = run_rounds(contenders, arguments.rounds)
    finally:
        alone.close()
    rounds.derive("hetero", partial(of_bound, job.setting.params, dtypes, case.options.accumulate))
    placement = job.engine.placement
    figures = rounds.figures()
    return {
        "params": job.setting.params,
        "dtype": job.setting.dtype,
        "io_engine": job.engine.io_engine,
        "budget_bytes": job.setting.budget_bytes,
        "compute_from": alone.method,
        "homes": {
            part: Counter(tier.value for tier in getattr(placement, part) if tier is not None)
            for part in ("param", "grad", "optim_state")
        },
        "contenders": figures,
        "bound": max(RESOURCES, key=lambda part: middle(figures["hetero"][part])),
    }


def dram_bytes(params: int, dtypes: Dtypes, accumulate: int, moved: Sample) -> float:
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


def of_bound(params: int, dtypes: Dtypes, accumulate: int, made: Mapping[str, Sample]) -> Sample:
    """Seconds that each of RESOURCES needs for hetero's step, and that over the largest of them."""
    step, rates = made["hetero"], {name: 1e9 * s["gbps"] for name, s in made.items() if "gbps" in s}
    touched = dram_bytes(params, dtypes, accumulate, step)
    seconds = {
        "compute": made["compute"]["compute_s"],
        "link": max(step["h2d"], step["d2h"]) / rates.get("link", 1.0),
        "NVMe": (step["disk_read"] + step["disk_write"]) / rates["NVMe"],
        "DRAM": touched / rates["DRAM"],
    }
    bound_s = max(seconds.values())
    ratio = step["step_s"] / bound_s
    return {**seconds, "dram": touched, "bound_s": bound_s, "ratio": ratio}


COLUMNS = (
    Column("seconds", "s", ranged(3)),
    *(Column(p, f"{p}_s", number()) for p in ("forward", "backward", "optimizer", "update")),
    *(Column(way, way, size) for way in ("h2d", "d2h")),
    Column("read", "disk_read", size),
    Column("written", "disk_write", size),
    Column("touched", "dram", size),
    Column("GB/s", "gbps", ranged()),
)


def show(result: dict[str, Any]) -> Iterator[str]:
    """A table per case."""
    for case in result["cases"]:
        if case["status"] != "measured":
            yield f"{case['name']}: {case['status']}: {case['reason']}"
            continue
        figures = case["contenders"]
        own = figures["hetero"]
        rows = {"hetero": {**own, "s": own["step_s"]}}
        rows |= {part: {**figures.get(part, {}), "s": own[part]} for part in RESOURCES}
        yield of_figures(
            f"bench.bound: {case['name']}, {case['params'] / 1e6:.0f}M parameters,"
            f" {case['dtype']}, {size(case['budget_bytes']['host'])} of RAM; compute from"
            f" {case['compute_from']}",
            rows,
            COLUMNS,
        )
        yield (
            f"step {middle(own['step_s']):.3f} s, bound {middle(own['bound_s']):.3f} s by"
            f" {case['bound']}: {ranged()(own['ratio'])} times (goal {result['goal']})"
        )


PROGRAM = Program(
    "bench.bound", __doc__, OPTIONS, run, show, lambda parser: add_train_arguments(parser, DEFAULTS)
)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
