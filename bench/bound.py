"""A training step beside the time that its slowest resource needs at least.

usage: python -m bench.bound [options of `hetero train`] [--models gpt2-medium,gpt2-1.3b]
                             [--settings nvme,emulated] [--clipped 0,10,50,100]
                             [--picture FILE] [--json]

The bound of a step is the largest of four times, all measured in the same rounds as the step:

  compute  forward and backward of the model in plain torch, in memory and in the same dtype, plus
           hetero's update kernel on all parameters, in RAM; the CPU does all of these, so they are
           added (bench/work/compute_alone.py)
  link     bytes to or from the emulated device, whichever takes longer, at what a link of
           --link-gbps moves alone
  NVMe     bytes read and written, at what the same I/O engine moves alone when it reads and writes
           in the step's proportion
  DRAM     bytes that update, kept gradients, the disk's and the link's copies touch in RAM
           (bench/work/lower_bound.py has the formula), at the rate of a kernel that does next to
           nothing else

What is updated during backward is updated once more if the step turns out to be clipped, so the
share of steps that are matters: --clipped gives each of its shares, whatever the gradients' norms.

A round measures some steps in a row, after one that is not counted, so that each begins as in a
long training: while the step before is still being written. Ratios are taken within a round and
their median given. --picture draws two more steps.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from bench.harness.program import (
    FILE,
    SIZE,
    Kind,
    Option,
    Program,
    list_of,
    names,
    one_of,
    some_of,
    titled,
    whole,
)
from bench.harness.rounds import Sample, run_rounds
from bench.work.bandwidths import LinkBandwidth, MemoryBandwidth
from bench.work.compute_alone import ComputeAlone, resident_bytes
from bench.work.job_steps import JobSteps, overlap
from bench.work.lower_bound import RESOURCES, summarize
from bench.work.transfers import HeteroTransfers, Shape, measured_file
from hetero.chunks.dtypes import Dtypes
from hetero.cli.job.job import Job, open_job
from hetero.cli.job.loop import PICTURED_STEPS, record_steps
from hetero.cli.job.models import (
    count_parameters,
    model_config,
    model_label,
    wanted_vocab_size,
)
from hetero.cli.job.options import TrainOptions, add_train_arguments
from hetero.cli.job.run_folder import RunFolder
from hetero.cli.show.step_timeline import check_steps_picture, draw_steps
from offload.errors import HeteroError
from offload.memory.sizes import format_bytes

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

# The engine of hetero.initialize() has these; the yardstick must not have less in flight.
DEPTH = 32
BLOCK_BYTES = 1 << 20


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


OPTIONS = (
    Option("--models", MODELS, "names, where neither --model nor --config is given"),
    Option(
        "--settings",
        ",".join(SETTINGS),
        "nvme: policy nvme, computing in RAM; emulated: policy auto, on an emulated device behind a"
        " link; budgets that are not given are a third of 16 bytes a parameter of RAM, and an"
        " eighth of the device",
        some_of(SETTINGS),
    ),
    Option(
        "--clipped",
        "0,10,50,100",
        "percentages of the steps that are clipped",
        list_of(Kind("PERCENT", _percentage)),
    ),
    Option("--rounds", "3", "of --steps steps in a row each, after one of warm-up", whole()),
    Option(
        "--compute",
        "auto",
        "how compute alone is measured: with the whole model, or from some of its layers; auto:"
        " whole where RAM holds it beside --host-memory",
        one_of(("auto", "whole", "layers")),
    ),
    Option("--io-size", "1GiB", "of the file on which the disk alone is measured", SIZE),
    Option(
        "--picture",
        None,
        "draws two steps' timeline, and writes it as a trace (.trace.json) for ui.perfetto.dev; of"
        " several cases each gets its name before the suffix",
        FILE,
    ),
)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of all cases. Raises ValueError for options that cannot work."""
    if arguments.backend != "cpu":
        raise ValueError("--backend follows from --settings; leave it out")
    if arguments.timeline is not None:
        raise ValueError("--timeline is of `hetero train`; here it is --picture")
    if arguments.picture is not None:
        check_steps_picture("--picture", Path(arguments.picture))
    given = arguments.nvme_path[0] if arguments.nvme_path else None
    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="hetero-bound-", dir=given)
        folder = stack.enter_context(temporary)
        shape = Shape.of(arguments.io_size, BLOCK_BYTES, DEPTH)
        cases = list(_cases(arguments))
        file = stack.enter_context(measured_file(given or folder, shape.size_bytes))
        found = [_case(case, arguments, folder, file, shape, len(cases) > 1) for case in cases]
    return {
        "cases": found,
        "goal": GOAL,
        "within_goal": sum(case.get("ratio", GOAL + 1) <= GOAL for case in found),
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
    file: str,
    shape: Shape,
    several: bool,
) -> dict[str, Any]:
    """One case's figures; those of its refusal if its budgets cannot work."""
    _tell(case.name)
    about = {"name": case.name, "options": case.options.as_dict()}
    try:
        with contextlib.ExitStack() as stack:
            run_folder = stack.enter_context(RunFolder(folder))
            job = stack.enter_context(open_job(case.options, run_folder))
            kind = job.engine.io_engine or "io_uring"
            disk = stack.enter_context(HeteroTransfers(kind, file, shape))
            result = _measure(case, job, disk, arguments)
            if arguments.picture is not None:
                picture = _picture_path(arguments.picture, case.name if several else None)
                result["timeline"] = _draw(job, case, picture)
    except HeteroError as error:
        return {**about, "status": "refused", "reason": str(error)}
    return {**about, "status": "measured", **result}


def _measure(
    case: Case, job: Job, disk: HeteroTransfers, arguments: argparse.Namespace
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
    memory = MemoryBandwidth()

    def disk_sample() -> Sample:
        return disk.sample_share(steps.read_share)

    contenders: dict[str, Callable[[], Sample]] = {
        "hetero": partial(steps.sample, case.steps),
        "compute": partial(alone.sample, arguments.steps),
        "NVMe": disk_sample,
        "DRAM": memory.sample,
    }
    if case.options.backend == "emulated":
        contenders["link"] = LinkBandwidth(case.options.link_gbps or 0).sample
    try:
        steps.warm_up()
        rounds = run_rounds(contenders, arguments.rounds)
    finally:
        alone.close()
    placement = job.engine.placement
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
        **summarize(rounds, job.setting.params, dtypes, case.options),
    }


def _picture_path(given: str, name: str | None) -> Path:
    path = Path(given)
    words = [] if name is None else re.findall(r"[\w.-]+", name)
    return path.with_stem("-".join([path.stem, *words]))


def _draw(job: Job, case: Case, picture: Path) -> dict[str, Any]:
    """Draws PICTURED_STEPS steps, and says how much of them overlapped."""
    steps = JobSteps(job, case.clipped)
    steps.warm_up()

    def pictured() -> None:
        for _ in range(PICTURED_STEPS):
            steps.one()

    timeline = record_steps(job.engine, pictured)
    trace = draw_steps(timeline, picture, f"{case.name}: {PICTURED_STEPS} training steps")
    return {"picture": str(picture), "trace": str(trace), **overlap(timeline)}


def show(result: dict[str, Any]) -> Iterator[str]:
    """A table per case."""
    for case in result["cases"]:
        if case["status"] != "measured":
            yield f"{case['name']}: {case['status']}: {case['reason']}"
            continue
        yield _table(case)
        yield (
            f"step {case['step_s']:.3f} s, bound {case['bound_s']:.3f} s by {case['bound']}:"
            f" {case['ratio']:.2f} times (goal {result['goal']})"
        )
        if "timeline" in case:
            drawn = case["timeline"]
            yield (
                f"of {drawn['seconds']:.2f} s drawn NVMe was busy {drawn['nvme_busy_s']:.2f} s,"
                f" {drawn['nvme_beside_compute_s']:.2f} s of them beside compute; the link"
                f" {drawn['link_busy_s']:.2f} s, {drawn['link_beside_compute_s']:.2f} s:"
                f" {drawn['picture']}, {drawn['trace']}"
            )


def _table(case: Mapping[str, Any]) -> str:
    parts, moved, rates = case["parts_s"], case["bytes"], case["gbps"]
    compute, size = case["compute_s"], format_bytes

    def each(seconds: Mapping[str, float]) -> str:
        return ", ".join(f"{k[:-2]} {v:.2f}" for k, v in seconds.items() if k != "compute_s")

    whats = {
        "compute": f"{each(compute)} ({case['compute_from']})",
        "link": f"{size(round(moved['h2d']))} there, {size(round(moved['d2h']))} back",
        "NVMe": f"{size(round(moved['disk_read']))} read, {size(round(moved['disk_write']))}"
        " written",
        "DRAM": f"{size(round(moved['dram']))} touched",
    }
    rows = [["", "seconds", "of"], ["step", f"{case['step_s']:.3f}", each(case["phases_s"])]]
    for part in RESOURCES:
        rate = f" at {rates[part]:.2f} GB/s" if part in rates else ""
        rows.append([part, f"{parts[part]:.3f}", whats[part] + rate])
    return titled(
        f"bench.bound: {case['name']}, {case['params'] / 1e6:.0f}M parameters,"
        f" {case['dtype']}, {size(case['budget_bytes']['host'])} of RAM",
        rows,
    )


def _tell(text: str) -> None:
    print(f"bench.bound: {text}", file=sys.stderr, flush=True)


PROGRAM = Program(
    "bench.bound", __doc__, OPTIONS, run, show, lambda parser: add_train_arguments(parser, DEFAULTS)
)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
