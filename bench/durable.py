"""Training whose state survives a crash (durable=True) beside the same training without.

usage: python -m bench.durable [--model gpt2] [--policy nvme|cpu] [--path DIR] [--rounds N]
                               [--steps N] [--every 1,8] [--json]

In turns: steps of a plain job; of one that verifies what it reads (verify_reads=True); and of a
durable one, which does that too, with a commit after every k-th step: its time ends when the last
commit is durable. "Written" is what a step writes to NVMe, its commit included.
"Commit alone" is hetero.commit(blocking=True) after a step, with nothing beside it: what is not on
NVMe yet is written, then all is flushed, then the record. "Start" is the time from the model's
construction on until a plain training could make its first step, and until one that was killed
could go on. "On NVMe" is what the data files of the plain and the durable job take.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import hetero
from bench.harness.program import FOLDER, Option, Program, list_of, ranged, titled, whole
from bench.harness.rounds import Rounds, Sample, run_rounds
from bench.work.job_steps import JobSteps, job_options, steady_options
from hetero.cli.job.job import Job, open_job
from hetero.cli.job.models import model_label
from hetero.cli.job.options import TrainOptions
from hetero.cli.job.run_folder import RunFolder
from offload.memory.sizes import format_bytes

OPTIONS = (
    *job_options("gpt2"),
    Option("--path", ".", "directory on NVMe", FOLDER),
    Option("--rounds", "3", "after one of warm-up", whole()),
    Option("--steps", "8", "in a row", whole()),
    Option("--every", "1,8", "steps of a commit", list_of(whole())),
)


class DurableSteps:
    """Steps of a durable job, with commits."""

    def __init__(self, job: Job) -> None:
        self._job, self.steps = job, JobSteps(job)
        self._step = 0

    def commit(self) -> hetero.Save:
        """As the loop of hetero train makes it."""
        self._step += 1
        objects = {"scheduler": self._job.scheduler, "data": self._job.task.data}
        return hetero.commit(self._job.model, extra={**objects, "step": self._step})

    def sample(self, steps: int, every: int) -> Sample:
        """{"step_s", "written_bytes"} of a step, after one that is not counted, until the last
        commit is durable."""
        self.steps.one()
        commit = self.commit()
        commit.wait()
        before, began_s = self._job.engine.traffic.disk_write, time.perf_counter()
        for step in range(1, steps + 1):
            self.steps.one()
            if step % every == 0 or step == steps:
                commit = self.commit()
        commit.wait()
        seconds = time.perf_counter() - began_s
        written = self._job.engine.traffic.disk_write - before
        return {"step_s": seconds / steps, "written_bytes": written / steps}

    def commit_alone(self) -> Sample:
        """{"s", "written_bytes"} of a commit that nothing goes on beside."""
        self.steps.one()
        self.steps.wait_until_quiet()
        before, began_s = self._job.engine.traffic.disk_write, time.perf_counter()
        self.commit().wait()
        seconds = time.perf_counter() - began_s
        return {"s": seconds, "written_bytes": self._job.engine.traffic.disk_write - before}


def _plain(steps: JobSteps, count: int) -> Sample:
    found = steps.sample(count)
    return {"step_s": found["step_s"], "written_bytes": found["disk_write"]}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures all in turns. Raises ValueError, OSError or a hetero error for input that cannot be
    measured."""
    counts, options = arguments.every, steady_options(arguments)
    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="hetero-bench-", dir=arguments.path)
        folder = Path(stack.enter_context(temporary))
        jobs = stack.enter_context(contextlib.ExitStack())
        _, plain = jobs.enter_context(_opened(options, folder / "plain"))
        durable_options = dataclasses.replace(options, commit_every=1)
        _, durable = jobs.enter_context(_opened(durable_options, folder / "durable"))
        verifying = dataclasses.replace(options, verify_reads=True)
        _, verified = jobs.enter_context(_opened(verifying, folder / "verified"))
        own, steps, checked = DurableSteps(durable), JobSteps(plain), JobSteps(verified)
        for each in (steps, checked, own.steps):
            each.warm_up()
        contenders: dict[str, Callable[[], Sample]] = {
            "plain": partial(_plain, steps, arguments.steps),
            "verified": partial(_plain, checked, arguments.steps),
        }
        for every in counts:
            contenders[f"every {every}"] = partial(own.sample, arguments.steps, every)
        contenders["commit alone"] = own.commit_alone
        rounds = run_rounds(contenders, arguments.rounds)
        result = {
            "model": model_label(options),
            "policy": options.policy,
            "params": plain.setting.params,
            "dtype": plain.setting.dtype,
            "budget_bytes": plain.setting.budget_bytes,
            "plain_bytes": _file_bytes(plain),
            "durable_bytes": _file_bytes(durable),
            **summarize(rounds, counts),
        }
        jobs.close()
        with _opened(options, folder / "plain") as (plain_s, _):
            pass
        with _opened(durable_options, folder / "durable") as (durable_s, _):
            result["start"] = {"plain_s": plain_s, "durable_s": durable_s}
    return result | {"steps": arguments.steps, "rounds": arguments.rounds}


def _file_bytes(job: Job) -> int:
    disks = (group.disk for group in job.engine.chunk_groups)
    members = (each for disk in disks if disk is not None for each in disk.scratch.members)
    return sum(each.nbytes for each in members)


@contextlib.contextmanager
def _opened(options: TrainOptions, path: Path) -> Iterator[tuple[float, Job]]:
    """A job whose files are in `path`, and the seconds in which it was made."""
    path.mkdir(exist_ok=True)
    options = dataclasses.replace(options, nvme_path=(str(path),))
    began_s = time.perf_counter()
    with RunFolder(str(path / "run")) as run_folder, open_job(options, run_folder) as job:
        yield time.perf_counter() - began_s, job


def summarize(rounds: Rounds, counts: Sequence[int]) -> dict[str, Any]:
    """Medians over the rounds; ratios are taken within each round."""
    found: dict[str, Any] = {"every": {}}
    for name in ("plain", "verified", *(f"every {every}" for every in counts)):
        figures = {
            "step_s": rounds.median(name, "step_s"),
            "written_bytes": rounds.median(name, "written_bytes"),
            "range_s": rounds.spread(name, "step_s"),
        }
        figures["slower_by"] = rounds.ratio(name, "plain", "step_s")
        if name in ("plain", "verified"):
            found[name] = figures
        else:
            found["every"][name.removeprefix("every ")] = figures
    found["commit_alone"] = {
        "s": rounds.median("commit alone", "s"),
        "written_bytes": rounds.median("commit alone", "written_bytes"),
        "range_s": rounds.spread("commit alone", "s"),
    }
    return found


def show(result: dict[str, Any]) -> Iterator[str]:
    """A table of steps, and a line on space, a commit alone and the start."""
    rows = [["", "step, s", "/ plain", "written a step"]]
    found = {"plain": result["plain"], "verified reads": result["verified"]}
    found |= {f"a commit every {k} steps": figures for k, figures in result["every"].items()}
    for name, figures in found.items():
        written = format_bytes(round(figures["written_bytes"]))
        rows.append([name, ranged(figures["range_s"], 3), f"{figures['slower_by']:.2f}", written])
    yield titled(
        f"bench.durable: {result['model']} {result['policy']},"
        f" {result['params'] / 1e6:.0f}M parameters, {result['dtype']}, median of"
        f" {result['rounds']} rounds of {result['steps']} steps (least-most)",
        rows,
    )
    alone, start = result["commit_alone"], result["start"]
    yield (
        f"commit alone {alone['s']:.3f} s for {format_bytes(round(alone['written_bytes']))};"
        f" on NVMe {format_bytes(result['durable_bytes'])},"
        f" plain {format_bytes(result['plain_bytes'])};"
        f" start {start['durable_s']:.2f} s, plain {start['plain_s']:.2f} s"
    )


PROGRAM = Program("bench.durable", __doc__, OPTIONS, run, show)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
