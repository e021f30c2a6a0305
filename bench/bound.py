"""A training step beside the time that its slowest resource needs at least.

usage: python -m bench.bound [options of `hetero train`] [--models gpt2-medium,gpt2-1.3b]
                             [--clipped 0,10,50,100] [--json]

The bound of a step is the largest of four times, all measured in the same rounds as the step:

  compute  forward and backward of the model in plain torch, in memory and in the same dtype, plus
           hetero's update kernel on all parameters, in RAM; the CPU does all of these, so they are
           added. Each gradient is freed as soon as it is complete: with all of them kept, torch
           takes new memory from the system in every backward, which took longer than copying them
  link     bytes to or from an emulated device (--backend emulated --link-gbps X), whichever are
           more, at the rate that is emulated
  NVMe     bytes read and written, at what the same I/O engine moves alone when it reads and writes
           in the step's proportion
  DRAM     bytes that update, kept gradients and the disk's copies touch in RAM (see dram_bytes()),
           at the rate of a kernel that does next to nothing else

What is updated during backward is updated once more if the step turns out to be clipped, so the
share of steps that are matters: --clipped gives each of its percentages, whatever the gradients'
norms.

A round measures some steps in a row, after one that is not counted, so that each begins as in a
long training: while the step before is still being written. Ratios are taken within a round and
their median given. (`hetero train --timeline FILE` draws such steps.)
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bench.harness.program import Program, add_options, byte_size, list_of, tell, whole
from bench.harness.rounds import Sample, run_rounds
from bench.harness.tables import middle, number, of_figures, ranged, size
from bench.io import disk_alone
from bench.work.job_steps import JobSteps, add_job_options, job_options
from hetero.chunks.dtypes import Dtypes
from hetero.job.data import load_corpus
from hetero.job.job import Job, open_job
from hetero.job.models import build_model, count_parameters, model_config, model_label
from hetero.job.options import TrainOptions
from hetero.job.run_folder import RunFolder
from offload.errors import HeteroError
from offload.profile.measure import UpdateArrays

STATE_BYTES = 16  # per parameter: a third of it is the budget, by default
UPDATE_NUMEL = 32 << 20  # of the arrays that updates are measured on: beyond any cache
STREAM_NUMEL = 16 << 20  # four arrays of 64 MiB: no cache holds them
RESOURCES = ("compute", "link", "NVMe", "DRAM")


def options(parser: argparse.ArgumentParser) -> None:
    add_job_options(parser, model=None, steps=3, policy="nvme")
    add_options(
        parser.add_argument_group("benchmark"),
        ("--models", list_of(str), "gpt2-medium,gpt2-1.3b", "without --model"),
        ("--clipped", list_of(_percentage), "0,10,50,100", "per cent of steps that are clipped"),
        ("--rounds", whole(), "3", "of --max-steps steps in a row, after one of warm-up"),
        ("--io-size", byte_size, "1GiB", "of the file on which the disk alone is measured"),
    )


def _percentage(text: str) -> float:
    found = float(text) if text.replace(".", "", 1).isdigit() else -1.0
    if not 0 <= found <= 100:
        raise argparse.ArgumentTypeError(f"must be percentages such as 0,50,100, got {text!r}")
    return found


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of all cases. Raises ValueError for options that cannot work."""
    if arguments.backend not in ("cpu", "emulated") or arguments.timeline is not None:
        raise ValueError(
            "computing is measured on the CPU; leave out --backend cuda and --timeline"
        )
    given = arguments.nvme_path[0] if arguments.nvme_path else None
    found = []
    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="hetero-bound-", dir=given)
        folder = stack.enter_context(temporary)
        disk = stack.enter_context(disk_alone(given or folder, arguments.io_size))
        for options in _models(arguments):
            for percent in arguments.clipped:
                name = f"{model_label(options)}, {percent:g} % clipped"
                tell(f"bench.bound: {name}")
                try:
                    with RunFolder(folder) as run_folder, open_job(options, run_folder) as job:
                        case = _measure(job, percent / 100, disk, arguments.rounds)
                except HeteroError as error:
                    case = {"status": "refused", "reason": str(error)}
                found.append({"name": name, "options": options.as_dict(), **case})
    return {"cases": found}


def _models(arguments: argparse.Namespace) -> Iterator[TrainOptions]:
    models = arguments.models if arguments.model is None else [arguments.model]
    for model in models:
        options = job_options(arguments, model=model)
        if options.host_memory is None:
            third = STATE_BYTES * count_parameters(model_config(options)) // 3
            options = replace(options, host_memory=str(third))
        yield options


def _measure(
    job: Job, clipped: float, disk: Callable[[float], Sample], rounds_count: int
) -> dict[str, Any]:
    """`clipped`: the share of the steps. A sample is as many steps as --max-steps says, or so many
    more that the share comes out."""
    dtypes: Dtypes = job.engine.chunk_groups[0].dtypes
    steps, given = JobSteps(job, clipped), job.options.steps
    arrays = UpdateArrays(STREAM_NUMEL)
    rarer = min(clipped, 1 - clipped)
    turns: dict[str, Callable[[], Sample]] = {
        "hetero": partial(steps.sample, max(given, round(1 / rarer) if rarer else 1)),
        "compute": partial(ComputeAlone(job.options, dtypes).sample, given),
        "NVMe": lambda: disk(steps.read_share),
        "DRAM": lambda: {"gbps": arrays.stream() / 1e9},
    }
    steps.warm_up()
    rounds = run_rounds(turns, rounds_count)
    turns.clear()
    gc.collect()
    made = job.setting.params, dtypes, job.options.accumulate, job.options.link_gbps
    rounds.derive("hetero", partial(of_bound, *made))
    figures = rounds.figures()
    return {
        "status": "measured",
        "params": job.setting.params,
        "dtype": job.setting.dtype,
        "io_engine": job.engine.io_engine,
        "budget_bytes": job.setting.budget_bytes,
        "contenders": figures,
        "bound": max(RESOURCES, key=lambda part: middle(figures["hetero"][part])),
    }


class ComputeAlone:
    """The model and arrays in RAM: what the CPU must compute in a step at least."""

    def __init__(self, options: TrainOptions, dtypes: Dtypes) -> None:
        architecture = model_config(options)
        torch.manual_seed(0)
        self.model = build_model(architecture).to(dtypes.torch_compute)
        for param in self.model.parameters():
            param.register_post_accumulate_grad_hook(_free_grad)
        self._params = count_parameters(architecture)
        self._options, self._dtypes = options, dtypes
        self._corpus = load_corpus(options.data, options.seq_len, options.seed)
        self._arrays = UpdateArrays(min(UPDATE_NUMEL, max(self._params, 1 << 16)))

    def sample(self, passes: int) -> Sample:
        """Seconds of a step: {"forward_s", "backward_s", "update_s", "compute_s"}.

        Forward and backward are medians of `passes`, after one that is not counted.
        """
        timed = [self._timed_pass() for _ in range(passes + 1)][1:]
        middles = [statistics.median(seconds) for seconds in zip(*timed, strict=True)]
        forward_s, backward_s = (self._options.accumulate * seconds for seconds in middles)
        kind = self._dtypes.kind
        update_s = kind.bytes_moved(self._params) / self._arrays.update(kind)
        parts = {"forward_s": forward_s, "backward_s": backward_s, "update_s": update_s}
        return {**parts, "compute_s": sum(parts.values())}

    def _timed_pass(self) -> tuple[float, float]:
        tokens = self._corpus.batch(self._options.batch_size)
        begin_s = time.perf_counter()
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.item()
        middle_s = time.perf_counter()
        loss.backward()
        return middle_s - begin_s, time.perf_counter() - middle_s


def _free_grad(param: torch.Tensor) -> None:
    param.grad = None


def dram_bytes(params: int, dtypes: Dtypes, accumulate: int, moved: Sample) -> float:
    """Bytes of RAM that a step reads and writes, without what forward and backward themselves do.

    Per parameter: what the update kernel counts (26 for AdamW in bf16); a gradient, read and
    written, for keeping the first micro-batch's, and three of them for adding each further one's;
    the norm's sums are taken on the way. Of what the disk moves ("disk_read", "disk_write") each
    byte once.
    """
    grads = 2 + 3 * (accumulate - 1)
    per_param = dtypes.update_bytes + grads * dtypes.grad_bytes
    return params * per_param + moved["disk_read"] + moved["disk_write"]


def of_bound(
    params: int,
    dtypes: Dtypes,
    accumulate: int,
    link_gbps: float | None,
    made: Mapping[str, Sample],
) -> Sample:
    """Seconds that each of RESOURCES needs for hetero's step, and that over the largest of them."""
    step = made["hetero"]
    touched = dram_bytes(params, dtypes, accumulate, step)
    seconds = {
        "compute": made["compute"]["compute_s"],
        "link": max(step["h2d"], step["d2h"]) / (1e9 * link_gbps) if link_gbps else 0.0,
        "NVMe": (step["disk_read"] + step["disk_write"]) / (1e9 * made["NVMe"]["gbps"]),
        "DRAM": touched / (1e9 * made["DRAM"]["gbps"]),
    }
    bound_s = max(seconds.values())
    return {**seconds, "dram": touched, "bound_s": bound_s, "ratio": step["step_s"] / bound_s}


COLUMNS = (
    ("seconds", "s", ranged(3)),
    *((part, f"{part}_s", number()) for part in ("forward", "backward", "optimizer", "update")),
    ("read", "disk_read", size),
    ("written", "disk_write", size),
    ("touched", "dram", size),
    ("GB/s", "gbps", ranged()),
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
        title = f"bench.bound: {case['name']}, {case['params'] / 1e6:.0f}M parameters,"
        title += f" {case['dtype']}, {size(case['budget_bytes']['host'])} of RAM"
        yield of_figures(title, rows, COLUMNS)
        yield (
            f"step {middle(own['step_s']):.3f} s, bound {middle(own['bound_s']):.3f} s by"
            f" {case['bound']}: {ranged()(own['ratio'])} times"
        )


PROGRAM = Program("bench.bound", __doc__, options, run, show)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
