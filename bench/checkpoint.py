"""Checkpoints of a training: beside what the disk gives, and beside PyTorch's.

usage: python -m bench.checkpoint [options of `hetero train`] [--policy nvme|cpu] [--path DIR]
                                  [--rounds N] [--peers torch,dcp|none] [--json]

hetero.save() and hetero.load() of a training job: seconds, and GB/s of the checkpoint's bytes. "Of
the disk" is the time that the disk needs for the same bytes, over that: measured in the same turn
in --path, with reads and writes in the same proportion. With policy nvme a save reads the state
that is on NVMe, and writes the checkpoint; a load does the reverse. With policy cpu they only
write, or read. "Memory" is the peak of the process's resident memory less what it was before. Steps
(--max-steps in a row) are measured alone and beside a save with blocking=False: what the save costs
of training, "lost", is the time until save() returns, and what its steps take longer.

Peers train in a process of their own in each round. "torch" is torch.save() with fsync, and
torch.load(); "dcp" torch.distributed.checkpoint, save(), load() and async_save(): both with fp32
weights and moments and bf16 autocast. All have 12 bytes a parameter. They write new files, where
hetero replaces a whole checkpoint by the next. All files' pages are dropped from the page cache
before loads. (What commits cost bench.train measures: --variants "nvme,nvme --commit-every 1".)
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import hetero
from bench.harness.program import Program, add_options, byte_size, left_out, names_of, whole
from bench.harness.ranks import run_trial
from bench.harness.rounds import ContenderError, Rounds, Sample, run_rounds
from bench.harness.tables import number, of_figures, ranged, size
from bench.io import disk_alone
from bench.peers.timing import drop_pages, steps_beside, timed, with_rate
from bench.train import write_workload
from bench.work.job_steps import JobSteps, add_job_options, job_options
from hetero.job.job import Job, open_job
from hetero.job.models import model_label
from hetero.job.options import TrainOptions
from hetero.job.run_folder import RunFolder

PEERS = ("torch", "dcp")
TIMEOUT_S = 1800.0


def options(parser: argparse.ArgumentParser) -> None:
    add_job_options(parser, steps=3, policy="nvme", seq_len=128, clip=0.0)
    add_options(
        parser.add_argument_group("benchmark"),
        ("--path", str, ".", "directory on NVMe; all is removed in the end"),
        ("--rounds", whole(), "3", "after one of warm-up"),
        ("--io-size", byte_size, "1GiB", "of the file on which the disk alone is measured"),
        ("--peers", names_of(PEERS), ",".join(PEERS), f"of {', '.join(PEERS)}; or none"),
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures all in turns. Raises ValueError, OSError or a hetero error for input that cannot be
    measured."""
    options = job_options(arguments)
    if not Path(arguments.path).is_dir():
        raise ValueError(f"--path {arguments.path} is not a directory; make it first")
    with tempfile.TemporaryDirectory(prefix="hetero-bench-", dir=arguments.path) as folder:
        rounds, found = measure(options, arguments, Path(folder).absolute())
    given = {name: getattr(arguments, name) for name in ("policy", "steps", "rounds")}
    named = {"model": model_label(options), "contenders": rounds.figures()}
    return {**given, **named, **found, "notes": left_out(rounds.failed)}


class HeteroCheckpoints:
    """Saves to one place, again and again, each save in place of the one before."""

    def __init__(self, job: Job, folder: Path, disk: Callable[[float], Sample]) -> None:
        self._job, self._disk = job, disk
        self._steps = JobSteps(job)
        self._path = folder / "hetero"

    def sample(self, steps: int) -> Sample:
        """A save and a load, each beside the disk; `steps` without a save; and steps beside one."""
        found = self._moved("save", lambda: hetero.save(self._path, *self._state()))
        drop_pages(self._path)

        def load() -> None:
            hetero.load(self._path, *self._state())
            self._job.engine.synchronize()  # what it gives to NVMe is there

        found |= self._moved("load", load)
        alone = self._steps.sample(steps)

        def begin() -> Callable[[], object]:
            return hetero.save(self._path, *self._state(), blocking=False).wait

        self._steps.one()
        found |= steps_beside(begin, self._steps.one)
        self._steps.wait_until_quiet()
        return {**found, "alone_step_s": alone["step_s"]}

    def warm_up(self) -> None:
        """Makes steps until those that follow are like those of a long training."""
        self._steps.warm_up()
        self._steps.wait_until_quiet()

    def _state(self) -> tuple[Any, hetero.HybridOptimizer]:
        return self._job.model, self._job.optimizer

    def _moved(self, what: str, body: Callable[[], object]) -> dict[str, float]:
        """The figures of a save or load, and what the disk alone takes for the same bytes: of a
        save those of state on NVMe are reads, and its files' are writes; of a load vice versa."""
        engine = self._job.engine
        before = engine.traffic
        figures = timed(body)
        after = engine.traffic
        self._steps.wait_until_quiet()
        figures = with_rate(figures, self._path)
        own = figures["bytes"]
        read = after.disk_read - before.disk_read + (own if what == "load" else 0)
        written = after.disk_write - before.disk_write + (own if what == "save" else 0)
        disk_s = (read + written) / (1e9 * self._disk(read / (read + written))["gbps"])
        figures |= {"read_bytes": read, "written_bytes": written}
        figures |= {"of_the_disk": disk_s / figures["s"]}
        return {f"{what}_{name}": figure for name, figure in figures.items()}


def measure(
    options: TrainOptions, arguments: argparse.Namespace, folder: Path
) -> tuple[Rounds, dict[str, Any]]:
    """Saves and loads of a job, and of peers."""
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(disk_alone(arguments.path, arguments.io_size))
        run_folder = stack.enter_context(RunFolder(str(folder)))
        job = stack.enter_context(open_job(options, run_folder))
        own = HeteroCheckpoints(job, folder, disk)
        turns: dict[str, Callable[[], Sample]] = {"hetero": partial(own.sample, arguments.steps)}
        write_workload(options, folder / "workload.json")
        for peer in arguments.peers:
            turns[peer] = partial(_peer_sample, peer, folder, arguments.steps)
        own.warm_up()
        rounds = run_rounds(turns, arguments.rounds)
        found = {"params": job.setting.params, "budget_bytes": job.setting.budget_bytes}
    for name in rounds.samples:
        if "alone_step_s" in rounds.samples[name][0]:
            rounds.derive(name, partial(of_beside, name))
        if name != "hetero":
            rounds.derive(name, partial(_beside_hetero, name))
    return rounds, found


def _peer_sample(peer: str, folder: Path, steps: int) -> Sample:
    command = [sys.executable, "-m", "bench.peers.checkpoint", peer, str(folder), str(steps)]
    found = run_trial(command, TIMEOUT_S)
    if found["status"] != "ended":
        raise ContenderError(found["error"])
    return {name: value for name, value in found.items() if isinstance(value, float)}


def of_beside(name: str, made: Mapping[str, Sample]) -> Sample:
    """Steps with a save over those without; "lost_s" is what the save cost of training."""
    own = made[name]
    lost_s = own["pause_s"] + own["steps"] * (own["step_s"] - own["alone_step_s"])
    return {"lost_s": lost_s, "slower_by": own["step_s"] / own["alone_step_s"]}


def _beside_hetero(name: str, made: Mapping[str, Sample]) -> Sample:
    """How many times as high hetero's rates are."""
    rates = ("save_gbps", "load_gbps")
    return {f"hetero_{rate}": made["hetero"][rate] / made[name][rate] for rate in rates}


SAVES = tuple(
    (f"{what} {head}", f"{what}_{key}", shown)
    for what in ("save", "load")
    for head, key, shown in (
        ("s", "s", ranged()),
        ("GB/s", "gbps", number()),
        ("read", "read_bytes", size),
        ("written", "written_bytes", size),
        ("/ disk", "of_the_disk", number()),
        ("memory", "above_bytes", size),
    )
)
COLUMNS = (
    *SAVES,
    ("hetero saves, times as fast", "hetero_save_gbps", number()),
    ("loads", "hetero_load_gbps", number()),
    ("step s", "step_s", ranged(3)),
    ("slower by", "slower_by", number()),
    ("lost s", "lost_s", number()),
)


def show(result: dict[str, Any]) -> Iterator[str]:
    """A row for each contender; steps are those beside a save."""
    title = f"bench.checkpoint: {result['model']} {result['policy']},"
    title += f" {result['params'] / 1e6:.0f}M parameters, median of {result['rounds']} rounds"
    yield of_figures(title, result["contenders"], COLUMNS)
    yield from result["notes"]


PROGRAM = Program("bench.checkpoint", __doc__, options, run, show)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
