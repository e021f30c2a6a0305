"""A training step beside the time that its slowest resource needs at least.

usage: python -m bench.bound [options of `hetero train`] [--models gpt2-medium,gpt2-1.3b]
                             [--settings nvme,emulated] [--picture FILE] [--json]

The bound of a step is the largest of four times, all measured in the same rounds as the step:

  compute  forward and backward of the model in plain torch, in memory and in the same dtype, plus
           the norm of the gradients and hetero's update kernel on all parameters, in RAM; the CPU
           does all of these, so they are added (bench/compute_alone.py)
  link     bytes to or from the emulated device, whichever takes longer, at what a link of
           --link-gbps moves alone
  NVMe     bytes read and written, at what the same I/O engine moves alone when it reads and writes
           in the step's proportion
  DRAM     bytes that update, norm, kept gradients, the disk's and the link's copies touch in RAM
           (dram_bytes() has the formula), at the rate of a kernel that does next to nothing else

A round measures some steps in a row, after one that is not counted, so that each begins as in a
long training: while the step before is still being written. Ratios are taken within a round and
their median given. --picture draws two more steps.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from bench.compute_alone import ComputeAlone, resident_bytes
from bench.machine import describe_machine
from bench.program import (
    command_line,
    names,
    parse_size,
    print_header,
    run_program,
)
from bench.rounds import Rounds, Sample, run_rounds
from bench.step import Stream
from bench.transfers import HeteroTransfers, Shape, measured_file
from hetero.chunks.dtypes import Dtypes
from hetero.cli.job.job import Job, open_job
from hetero.cli.job.loop import one_step
from hetero.cli.job.metrics import StepMetrics
from hetero.cli.job.models import (
    count_parameters,
    model_config,
    model_label,
    wanted_vocab_size,
)
from hetero.cli.job.options import TrainOptions, add_train_arguments
from hetero.cli.job.run_folder import RunFolder
from hetero.cli.job.step_timeline import (
    PICTURED_STEPS,
    check_picture,
    draw_steps,
    record_steps,
)
from offload._native import Arena, Link
from offload.errors import HeteroError
from offload.memory.sizes import format_bytes
from offload.timeline import Timeline

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
    "link_gbps": 8.0,
}
PARTS = ("compute", "link", "NVMe", "DRAM")
USUAL_STATE_BYTES = 16  # per parameter
HOST_SHARE, DEVICE_SHARE = 1 / 3, 1 / 8  # of that, by default

# The engine of hetero.initialize() has these; the yardstick must not have less in flight.
DEPTH = 32
BLOCK_BYTES = 1 << 20
LINK_COPY_BYTES = 64 << 20
LINK_COPIES = 4
QUIET_S = 0.2


@dataclass(frozen=True)
class Case:
    """One model in one setting."""

    name: str
    options: TrainOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 when something about the input is wrong."""
    arguments = _parser().parse_args(argv)

    def measure() -> dict[str, Any]:
        result = run(arguments)
        return {
            "machine": describe_machine(),
            "command": command_line("bench.bound", argv),
            **result,
        }

    return run_program("bench.bound", measure, show, arguments.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.bound",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_train_arguments(parser, DEFAULTS)
    group = parser.add_argument_group("benchmark")
    group.add_argument(
        "--models",
        default=MODELS,
        metavar="LIST",
        help="names, where neither --model nor --config is given (default: %(default)s)",
    )
    group.add_argument(
        "--settings",
        default=",".join(SETTINGS),
        metavar="LIST",
        help="nvme: policy nvme, computing in RAM; emulated: policy auto, on an emulated device"
        " behind a link; budgets that are not given are a third of 16 bytes a parameter of RAM, and"
        " an eighth of the device (default: %(default)s)",
    )
    group.add_argument(
        "--rounds",
        type=int,
        default=3,
        metavar="N",
        help="of --steps steps in a row each, after one of warm-up (default: %(default)s)",
    )
    group.add_argument(
        "--compute",
        choices=("auto", "whole", "layers"),
        default="auto",
        help="how compute alone is measured: with the whole model, or from some of its layers"
        " (default: whole where RAM holds it beside --host-memory)",
    )
    group.add_argument(
        "--io-size",
        default="1GiB",
        metavar="SIZE",
        help="of the file on which the disk alone is measured (default: %(default)s)",
    )
    group.add_argument(
        "--picture",
        metavar="FILE",
        help="draws two steps' timeline, and writes it as a trace (.trace.json) for"
        " ui.perfetto.dev; of several cases each gets its name before the suffix",
    )
    return parser


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of all cases. Raises ValueError for options that cannot work."""
    if arguments.rounds < 1:
        raise ValueError(f"--rounds must be 1 or more, got {arguments.rounds}")
    if arguments.backend != "cpu":
        raise ValueError("--backend follows from --settings; leave it out")
    if arguments.timeline is not None:
        raise ValueError("--timeline is of `hetero train`; here it is --picture")
    if arguments.picture is not None:
        check_picture("--picture", Path(arguments.picture))
    given = arguments.nvme_path[0] if arguments.nvme_path else None
    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="hetero-bound-", dir=given)
        folder = stack.enter_context(temporary)
        shape = Shape.of(parse_size("--io-size", arguments.io_size), BLOCK_BYTES, DEPTH)
        cases = list(_cases(arguments))
        file = stack.enter_context(measured_file(given or folder, shape.size_bytes))
        found = [_case(case, arguments, folder, file, shape, len(cases) > 1) for case in cases]
    return {
        "cases": found,
        "goal": GOAL,
        "within_goal": sum(case.get("ratio", GOAL + 1) <= GOAL for case in found),
    }


def _cases(arguments: argparse.Namespace) -> Iterator[Case]:
    settings = names(arguments.settings)
    for setting in settings:
        if setting not in SETTINGS:
            raise ValueError(f"--settings: unknown {setting!r}; known: {', '.join(SETTINGS)}")
    models = names(arguments.models)
    if arguments.model is not None or arguments.config is not None:
        models = [arguments.model or TrainOptions.model]
    if not models or not settings:
        raise ValueError("--models and --settings must name one at least")
    for model in models:
        for setting in settings:
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
            yield Case(f"{model_label(options)} {setting}", options)


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
    dtypes: Dtypes = job.engine.dtypes
    steps = Steps(job)
    whole = arguments.compute == "whole"
    if arguments.compute == "auto":
        # The engine has not touched most of its budgets yet.
        budgets = (job.setting.budget_bytes[tier] or 0 for tier in ("host", "device"))
        left = psutil.virtual_memory().available - sum(budgets)
        whole = resident_bytes(job.setting.params, dtypes) < left * 0.7
    alone = ComputeAlone(case.options, dtypes, whole)
    memory = Stream()

    def disk_sample() -> Sample:
        return disk.sample_share(steps.read_share)

    contenders: dict[str, Callable[[], Sample]] = {
        "hetero": partial(steps.sample, arguments.steps),
        "compute": partial(alone.sample, arguments.steps),
        "NVMe": disk_sample,
        "DRAM": memory.sample,
    }
    if case.options.backend == "emulated":
        contenders["link"] = LinkAlone(case.options.link_gbps or 0).sample
    try:
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


class Steps:
    """The training steps of a job, in samples of several in a row."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._begin_s = time.perf_counter()
        self._made = 0
        # Of the disk's bytes of the last sample.
        self.read_share = 0.5

    def one(self) -> StepMetrics:
        """Makes a step."""
        self._made += 1
        return one_step(self._job, self._made, self._begin_s)

    def sample(self, steps: int) -> dict[str, float]:
        """Means of `steps` steps after one that is not counted; then all is written."""
        self.one()
        before = self._job.engine.traffic
        begin_s = time.perf_counter()
        made = [self.one() for _ in range(steps)]
        seconds = time.perf_counter() - begin_s
        after = self._job.engine.traffic
        self._settle()
        moved = {
            name: (getattr(after, name) - getattr(before, name)) / steps
            for name in ("h2d", "d2h", "disk_read", "disk_write")
        }
        nvme = moved["disk_read"] + moved["disk_write"]
        self.read_share = moved["disk_read"] / nvme if nvme else 0.5
        return {
            "step_s": seconds / steps,
            "forward_s": statistics.mean(step.forward_s for step in made),
            "backward_s": statistics.mean(step.backward_s for step in made),
            "optimizer_s": statistics.mean(step.optimizer_s for step in made),
            **moved,
        }

    def _settle(self) -> None:
        """Until nothing goes on in the background, which would slow down what is measured next."""
        engine = self._job.engine
        engine.synchronize()
        before = None
        while before != engine.traffic:  # of what is read ahead
            before = engine.traffic
            time.sleep(QUIET_S)


class LinkAlone:
    """What an emulated link moves in one direction when nothing else goes on."""

    def __init__(self, gbps: float) -> None:
        self._gbps = gbps
        self._arena = Arena(2 * LINK_COPY_BYTES)
        torch.from_dlpack(self._arena.export(0, self._arena.nbytes)).zero_()  # type: ignore[attr-defined]

    def sample(self) -> dict[str, float]:
        """{"gbps"}"""
        link = Link(self._gbps * 1e9, self._gbps * 1e9)
        try:
            begin_s = time.perf_counter()
            to, source = self._arena.address, self._arena.address + LINK_COPY_BYTES
            ops = [link.copy("h2d", to, source, LINK_COPY_BYTES) for _ in range(LINK_COPIES)]
            for op in ops:
                op.wait()
            seconds = time.perf_counter() - begin_s
        finally:
            link.close()
        return {"gbps": LINK_COPIES * LINK_COPY_BYTES / seconds / 1e9}


def dram_bytes(
    params: int, dtypes: Dtypes, accumulate: int, clips: bool, moved: Mapping[str, float]
) -> float:
    """Bytes of RAM that a step reads and writes, without what forward and backward themselves do.

    Per parameter: what the update kernel counts (26 for AdamW in bf16); a gradient, read and
    written, for keeping the first micro-batch's, three of them for adding each further one's, and
    one for the norm. Of what is moved, by "disk_read", "disk_write", "h2d" and "d2h": each byte of
    the disk once, of the link twice, since the emulated device's memory is RAM, too.
    """
    grads = 2 + 3 * (accumulate - 1) + (1 if clips else 0)
    per_param = dtypes.kind.bytes_moved + grads * dtypes.grad_bytes
    disk = moved["disk_read"] + moved["disk_write"]
    return params * per_param + disk + 2 * (moved["h2d"] + moved["d2h"])


def summarize(rounds: Rounds, params: int, dtypes: Dtypes, options: TrainOptions) -> dict[str, Any]:
    """Medians over the rounds; the bound and the ratio are taken within each round."""
    seconds: dict[str, list[float]] = {part: [] for part in PARTS}
    touched: list[float] = []
    ratios: list[float] = []
    links = rounds.samples.get("link") or [{"gbps": 1.0}] * len(rounds.samples["hetero"])
    for step, compute, nvme, dram, link in zip(
        *(rounds.samples[name] for name in ("hetero", "compute", "NVMe", "DRAM")),
        links,
        strict=True,
    ):
        touched.append(dram_bytes(params, dtypes, options.accumulate, options.clip > 0, step))
        disk = step["disk_read"] + step["disk_write"]
        found = {
            "compute": compute["compute_s"],
            "link": max(step["h2d"], step["d2h"]) / (link["gbps"] * 1e9),
            "NVMe": disk / (nvme["gbps"] * 1e9),
            "DRAM": touched[-1] / (dram["gbps"] * 1e9),
        }
        for part in PARTS:
            seconds[part].append(found[part])
        ratios.append(step["step_s"] / max(found.values()))
    parts = {part: statistics.median(seconds[part]) for part in PARTS}

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
        "compute_s": median(
            "compute", "forward_s", "backward_s", "norm_s", "update_s", "compute_s"
        ),
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


def _picture_path(given: str, name: str | None) -> Path:
    path = Path(given)
    return path if name is None else path.with_stem(f"{path.stem}-{name.replace(' ', '-')}")


def _draw(job: Job, case: Case, picture: Path) -> dict[str, Any]:
    """Draws PICTURED_STEPS steps, and says how much of them overlapped."""
    steps = Steps(job)
    steps.one()

    def pictured() -> None:
        for _ in range(PICTURED_STEPS):
            steps.one()

    timeline = record_steps(job.engine, pictured)
    trace = draw_steps(timeline, picture, f"{case.name}: {PICTURED_STEPS} training steps")
    return {"picture": str(picture), "trace": str(trace), **overlap(timeline)}


def overlap(timeline: Timeline) -> dict[str, Any]:
    """Seconds in all, in which each lane was busy, and in which disk or link were beside compute.

    Beside compute is: beside forward, backward, or a tile of the update.
    """
    computing = replace(
        timeline, intervals=tuple(i for i in timeline.intervals if i.name != "optimizer")
    )
    return {
        "seconds": timeline.seconds,
        "busy_s": {lane: timeline.busy_s(lane) for lane in timeline.lanes},
        "nvme_busy_s": timeline.busy_s("nvme_read", "nvme_write"),
        "nvme_beside_compute_s": computing.both_s(
            ("compute", "update"), ("nvme_read", "nvme_write")
        ),
        "link_busy_s": timeline.busy_s("h2d", "d2h"),
        "link_beside_compute_s": computing.both_s(("compute", "update"), ("h2d", "d2h")),
        "dropped": timeline.dropped,
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Prints a table per case."""
    print_header(result, console)
    for case in result["cases"]:
        if case["status"] != "measured":
            text = f"{case['name']}: {case['status']}: {case['reason']}"
            console.print(text, markup=False, highlight=False)
            continue
        console.print(_table(case))
        console.print(
            f"step {case['step_s']:.3f} s, bound {case['bound_s']:.3f} s by {case['bound']}:"
            f" {case['ratio']:.2f} times (goal {result['goal']})",
            highlight=False,
        )
        if "timeline" in case:
            drawn = case["timeline"]
            console.print(
                f"of {drawn['seconds']:.2f} s drawn NVMe was busy {drawn['nvme_busy_s']:.2f} s,"
                f" {drawn['nvme_beside_compute_s']:.2f} s of them beside compute; the link"
                f" {drawn['link_busy_s']:.2f} s, {drawn['link_beside_compute_s']:.2f} s:"
                f" {drawn['picture']}, {drawn['trace']}",
                highlight=False,
            )


def _table(case: Mapping[str, Any]) -> Table:
    parts, moved, rates = case["parts_s"], case["bytes"], case["gbps"]
    compute, size = case["compute_s"], format_bytes
    table = Table(
        title=f"bench.bound: {case['name']}, {case['params'] / 1e6:.0f}M parameters,"
        f" {case['dtype']}, {size(case['budget_bytes']['host'])} of RAM",
        title_justify="left",
    )
    table.add_column("")
    table.add_column("seconds", justify="right")
    table.add_column("of")
    phases = ", ".join(f"{name[:-2]} {value:.2f}" for name, value in case["phases_s"].items())
    table.add_row("step", f"{case['step_s']:.3f}", phases)
    whats = {
        "compute": ", ".join(
            f"{name[:-2]} {value:.2f}" for name, value in compute.items() if name != "compute_s"
        )
        + f" ({case['compute_from']})",
        "link": f"{size(round(moved['h2d']))} there, {size(round(moved['d2h']))} back",
        "NVMe": f"{size(round(moved['disk_read']))} read, {size(round(moved['disk_write']))}"
        " written",
        "DRAM": f"{size(round(moved['dram']))} touched",
    }
    for part in PARTS:
        rate = f" at {rates[part]:.2f} GB/s" if part in rates else ""
        table.add_row(part, f"{parts[part]:.3f}", whats[part] + rate)
    return table


def _tell(text: str) -> None:
    print(f"bench.bound: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
