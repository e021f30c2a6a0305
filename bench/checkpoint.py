"""Checkpoints and commits of a training: beside what the disk gives, and beside PyTorch's.

usage: python -m bench.checkpoint [--of saves|commits] [--model gpt2-medium] [--policy nvme|cpu]
                                  [--path DIR] [--rounds N] [--peers torch,dcp,deepspeed|none]
                                  [--every 1,8] [--json]

saves    hetero.save() and hetero.load() of a training job: seconds, and GB/s of the checkpoint's
         bytes. "Of the disk" is the time that the disk needs for the same bytes, over that:
         measured in the same round in --path, with reads and writes in the same proportion. With
         policy nvme a save reads the state that is on NVMe, and writes the checkpoint; a load does
         the reverse. With policy cpu they only write, or read. "Memory" is the peak of the
         process's resident memory less what it was before. Steps are measured alone and beside a
         save with blocking=False: what the save costs of training, "lost", is the time until save()
         returns, and what its steps take longer.
         Peers train in processes of their own. "torch" is torch.save() with fsync, and
         torch.load(); "dcp" torch.distributed.checkpoint, save(), load() and async_save(): both
         with fp32 weights and moments and bf16 autocast. "deepspeed" is ZeRO-3's save_checkpoint()
         with fsync, and load_checkpoint(), with state offloaded to RAM. All have 12 bytes a
         parameter. They write new files, where hetero replaces a whole checkpoint by the next. All
         files' pages are dropped from the page cache before loads.
commits  in turns: steps of a plain job; of one that verifies what it reads (verify_reads=True); and
         of a durable one, which does that too, with a commit after every k-th step: its time ends
         when the last commit is durable. "Written" is what a step writes to NVMe, its commit
         included. "On NVMe" is what the data files take.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import hetero
from bench.harness.peer_process import PeerProcess
from bench.harness.program import Program, left_out, options, peer_options
from bench.harness.rounds import Sample, run_rounds
from bench.harness.tables import Column, Table, most_size, number, ranged, shown, size
from bench.peers.timing import drop_pages, steps_beside, timed, with_rate
from bench.train import write_workload
from bench.work.bandwidths import disk_alone
from bench.work.job_steps import JobSteps, job_options, steady_options
from hetero.job.job import Job, open_job
from hetero.job.models import model_label
from hetero.job.options import TrainOptions
from hetero.job.run_folder import RunFolder

PEERS = ("torch", "dcp", "deepspeed")
# Those of peers that share a process.
LIBRARIES = {"torch": ("torch", "dcp"), "deepspeed": ("deepspeed",)}

OPTIONS = (
    options(
        """
    --of       NAME     saves  what is measured
    --path     DIR      .      directory on NVMe; all is removed in the end
    --rounds   N        3      after one of warm-up
    --steps    N        3      in a row
    --every    NUMBERS  1,8    steps of a commit
    --io-size  SIZE     1GiB   of the file on which the disk alone is measured
    """,
        of=("saves", "commits"),
    )
    + job_options("gpt2-medium")
    + peer_options(PEERS)
)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures all in turns. Raises ValueError, OSError or a hetero error for input that cannot be
    measured."""
    options = steady_options(arguments)
    measure = measure_saves if arguments.of == "saves" else measure_commits
    if not Path(arguments.path).is_dir():
        raise ValueError(f"--path {arguments.path} is not a directory; make it first")
    with tempfile.TemporaryDirectory(prefix="hetero-bench-", dir=arguments.path) as folder:
        job, found = measure(options, arguments, Path(folder))
    return {
        "of": arguments.of,
        "model": model_label(options),
        "policy": options.policy,
        "params": job.setting.params,
        "dtype": job.setting.dtype,
        "budget_bytes": job.setting.budget_bytes,
        "steps": arguments.steps,
        "rounds": arguments.rounds,
        **found,
    }


# Saves and loads


class HeteroCheckpoints:
    """Saves to one place, again and again, each save in place of the one before.

    Attributes:
        read_share: by "save" and "load", how much of the bytes that the last one moved between disk
            and memory were reads: of a save the state that is on NVMe, and then its files' bytes
            are writes; of a load the other way round.
    """

    def __init__(self, job: Job, folder: Path) -> None:
        self.read_share = {"save": 0.0, "load": 1.0}
        self._job = job
        self._steps = JobSteps(job)
        self._path = folder / "hetero"

    def warm_up(self) -> None:
        """Makes steps until those that follow are like those of a long training."""
        self._steps.warm_up()
        self._steps.wait_until_quiet()

    def save(self) -> Sample:
        """A save that training waits for: {"s", "gbps", "bytes", "read_bytes", "written_bytes",
        "above_bytes"}. "gbps" counts the checkpoint's bytes alone."""
        return self._moved("save", lambda: hetero.save(self._path, *self._state()))

    def load(self) -> Sample:
        """A load, until what it gives to NVMe is there; figures as save()."""
        drop_pages(self._path)

        def load() -> None:
            hetero.load(self._path, *self._state())
            self._job.engine.synchronize()

        return self._moved("load", load)

    def step(self, steps: int) -> Sample:
        """Steps without a save: {"step_s"}, as JobSteps.sample(), and "above_bytes"."""
        found: dict[str, float] = {}
        above = timed(lambda: found.update(self._steps.sample(steps)))["above_bytes"]
        return {"step_s": found["step_s"], "above_bytes": above}

    def beside(self) -> Sample:
        """Steps beside a save with blocking=False, after one that is not counted: steps_beside()'s
        figures."""

        def begin() -> Callable[[], object]:
            return hetero.save(self._path, *self._state(), blocking=False).wait

        self._steps.one()
        found = steps_beside(begin, self._steps.one)
        self._steps.wait_until_quiet()
        return found

    def _state(self) -> tuple[torch.nn.Module, hetero.HybridOptimizer]:
        return self._job.model, self._job.optimizer

    def _moved(self, what: str, body: Callable[[], object]) -> Sample:
        engine = self._job.engine
        before = engine.traffic
        figures = timed(body)
        after = engine.traffic
        self._steps.wait_until_quiet()
        figures = with_rate(figures, self._path)
        of_load, of_save = (figures["bytes"] if what == each else 0 for each in ("load", "save"))
        read = after.disk_read - before.disk_read + of_load
        written = after.disk_write - before.disk_write + of_save
        self.read_share[what] = read / (read + written)
        return {**figures, "read_bytes": read, "written_bytes": written}


def measure_saves(
    options: TrainOptions, arguments: argparse.Namespace, folder: Path
) -> tuple[Job, dict[str, Any]]:
    """The job, and the figures of its saves and loads, of the disk, and of peers."""
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(disk_alone(arguments.path, arguments.io_size))
        run_folder = stack.enter_context(RunFolder(str(folder)))
        job = stack.enter_context(open_job(options, run_folder))
        own = HeteroCheckpoints(job, folder)
        contenders: dict[str, Callable[[], Sample]] = {
            "save": own.save,
            "disk save": lambda: disk(own.read_share["save"]),
            "load": own.load,
            "disk load": lambda: disk(own.read_share["load"]),
            "step": partial(own.step, arguments.steps),
            "beside": own.beside,
        }
        for library, names in LIBRARIES.items():
            chosen = [peer for peer in arguments.peers if peer in names]
            if chosen:
                process = stack.enter_context(
                    _peer_process(library, options, folder, arguments.peer_python)
                )
                contenders |= _peer_contenders(chosen, process, arguments.steps)
        own.warm_up()
        rounds = run_rounds(contenders, arguments.rounds)
    for name in rounds.samples:
        kind = name.split()[-1]
        if kind in ("save", "load") and not name.startswith("disk"):
            rounds.derive(name, partial(_of_transfer, name, kind))
        elif kind == "beside":
            rounds.derive(name, partial(_of_beside, name))
    return job, {"contenders": rounds.figures(), "notes": left_out(rounds.failed)}


def _of_transfer(name: str, what: str, made: Mapping[str, Sample]) -> Sample:
    """Of hetero's what the disk alone takes for it, of a peer's how much faster hetero is."""
    sample = made[name]
    if name != what:
        return {"hetero_is_faster_by": made[what]["gbps"] / sample["gbps"]}
    moved = sample["read_bytes"] + sample["written_bytes"]
    disk_s = moved / (made[f"disk {what}"]["gbps"] * 1e9)
    return {"disk_s": disk_s, "of_the_disk": disk_s / sample["s"]}


def _of_beside(name: str, made: Mapping[str, Sample]) -> Sample:
    """Steps with a save and without; "lost_s" is what the save cost of training."""
    saving, alone_s = made[name], made[name.replace("beside", "step")]["step_s"]
    lost_s = saving["pause_s"] + saving["steps"] * (saving["step_s"] - alone_s)
    return {"lost_s": lost_s, "slower_by": saving["step_s"] / alone_s}


def _peer_process(
    library: str, options: TrainOptions, folder: Path, peer_python: str
) -> PeerProcess:
    workload, checkpoints = folder.absolute() / "workload.json", folder.absolute() / "peers"
    write_workload(options, workload)
    checkpoints.mkdir(exist_ok=True)
    python = sys.executable if library == "torch" else peer_python
    return PeerProcess(
        (python, "-m", "bench.peers.checkpoint", library),
        {"workload": str(workload), "folder": str(checkpoints)},
        "pip install 'hetero[bench]'",
    )


def _peer_contenders(
    peers: Sequence[str], process: PeerProcess, steps: int
) -> dict[str, Callable[[], Sample]]:
    """A save before each load. Only torch.distributed.checkpoint saves beside training."""
    found: dict[str, Callable[[], Sample]] = {}
    for peer in peers:
        for what in ("save", "load"):
            found[f"{peer} {what}"] = partial(process.sample, what=what, how=peer)
    if "dcp" in peers:
        found["dcp step"] = partial(process.sample, what="step", how="dcp", steps=steps)
        found["dcp beside"] = partial(process.sample, what="beside", how="dcp")
    return found


# Commits


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
        """{"step_s", "disk_write"} of a step, after one that is not counted, until the last commit
        is durable."""
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
        return {"step_s": seconds / steps, "disk_write": written / steps}


def measure_commits(
    options: TrainOptions, arguments: argparse.Namespace, folder: Path
) -> tuple[Job, dict[str, Any]]:
    """The plain job, and the figures of all jobs' steps."""
    kinds = {
        "plain": options,
        "verified reads": replace(options, verify_reads=True),
        "durable": replace(options, commit_every=1),
    }
    with contextlib.ExitStack() as jobs:
        opened = {
            name: jobs.enter_context(_opened(kind, folder / name)) for name, kind in kinds.items()
        }
        own = DurableSteps(opened["durable"])
        steps = {name: JobSteps(job) for name, job in opened.items() if name != "durable"}
        for each in (*steps.values(), own.steps):
            each.warm_up()
        contenders: dict[str, Callable[[], Sample]] = {
            name: partial(each.sample, arguments.steps) for name, each in steps.items()
        }
        for every in arguments.every:
            contenders[f"a commit every {every}"] = partial(own.sample, arguments.steps, every)
        rounds = run_rounds(contenders, arguments.rounds)
        files = {name: _file_bytes(opened[name]) for name in ("plain", "durable")}
    rounds.compare("plain", "step_s", "slower_by")
    notes = [f"on NVMe {size(files['durable'])}, plain {size(files['plain'])}"]
    found = {"contenders": rounds.figures(), "file_bytes": files, "notes": notes}
    return opened["plain"], found


def _file_bytes(job: Job) -> int:
    disks = (group.disk for group in job.engine.chunk_groups)
    members = (each for disk in disks if disk is not None for each in disk.scratch.members)
    return sum(each.nbytes for each in members)


@contextlib.contextmanager
def _opened(options: TrainOptions, path: Path) -> Iterator[Job]:
    """A job whose files are in `path`."""
    path.mkdir()
    options = replace(options, nvme_path=(str(path),))
    with RunFolder(str(path / "run")) as run_folder, open_job(options, run_folder) as job:
        yield job


def _title(result: Mapping[str, Any]) -> str:
    return (
        f"bench.checkpoint, {result['of']}: {result['model']} {result['policy']},"
        f" {result['params'] / 1e6:.0f}M parameters, {result['dtype']}, median of"
        f" {result['rounds']} rounds (least-most)"
    )


TABLE = Table(
    _title,
    "contenders",
    (
        Column("s", "s", ranged()),
        Column("GB/s", "gbps", ranged()),
        Column("bytes", "bytes", size),
        Column("read", "read_bytes", size),
        Column("written", "written_bytes", size),
        Column("/ disk", "of_the_disk", number()),
        Column("hetero / it", "hetero_is_faster_by", number()),
        Column("step s", "step_s", ranged(3)),
        Column("slower by", "slower_by", number()),
        Column("written a step", "disk_write", size),
        Column("steps", "steps", number(0)),
        Column("save s", "save_s", number()),
        Column("pause s", "pause_s", number()),
        Column("lost s", "lost_s", number()),
        Column("memory", "above_bytes", most_size),
    ),
)
PROGRAM = Program("bench.checkpoint", __doc__, OPTIONS, run, shown(TABLE))
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
