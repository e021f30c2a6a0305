"""Checkpoints beside what the disk gives, and beside PyTorch's of the same model.

usage: python -m bench.checkpoint [--model gpt2-medium] [--policy nvme|cpu] [--path DIR]
                                  [--rounds N] [--peers torch,dcp,deepspeed|none]
                                  [--json]

hetero.save() and hetero.load() of a training job: seconds, and GB/s of the checkpoint's bytes. "Of
the disk" is the time that the disk needs for the same bytes, over that: measured in the same round
in --path, by the same I/O engine, with reads and writes in the same proportion. With policy nvme a
save reads the state that is on NVMe, and writes the checkpoint; a load does the reverse. With
policy cpu they only write, or read.

"Memory" is the peak of the process's resident memory less what it was before. Steps are measured
alone and beside a save with blocking=False: what the save costs of training is the time until
save() returns, and what its steps take longer.

Peers train in processes of their own. "torch" is torch.save() with fsync, and torch.load(); "dcp"
torch.distributed.checkpoint, save(), load() and async_save(): both with fp32 weights and moments
and bf16 autocast. "deepspeed" is ZeRO-3's save_checkpoint() with fsync, and load_checkpoint(), with
state offloaded to RAM. All have 12 bytes a parameter. They write new files, where hetero replaces a
whole checkpoint by the next. All files' pages are dropped from the page cache before loads.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness.peer_process import PeerProcess
from bench.harness.program import (
    FOLDER,
    SIZE,
    Option,
    Program,
    left_out,
    peers_of,
    ranged,
    titled,
    whole,
)
from bench.harness.rounds import Rounds, Sample, run_rounds
from bench.train import write_workload
from bench.work.checkpoints import HeteroCheckpoints
from bench.work.job_steps import job_options, steady_options
from bench.work.transfers import HeteroTransfers, Shape, measured_file
from hetero.cli.job.job import open_job
from hetero.cli.job.models import model_label
from hetero.cli.job.options import TrainOptions
from hetero.cli.job.run_folder import RunFolder
from offload.disk.scratch_file import make_io_engine
from offload.memory.sizes import format_bytes

PEERS = ("torch", "dcp", "deepspeed")
# The programs of peers, and who of them is in which.
PROGRAMS = {"checkpoint_torch": ("torch", "dcp"), "checkpoint_deepspeed": ("deepspeed",)}

# The I/O engine of a checkpoint has these; the yardstick must not have less in flight.
DEPTH = 32
BLOCK_BYTES = 1 << 20

MIB = 1 << 20


OPTIONS = (
    *job_options("gpt2-medium"),
    Option("--path", ".", "directory on NVMe; all is removed in the end", FOLDER),
    Option("--rounds", "3", "after one of warm-up", whole()),
    Option("--steps", "3", "in a row, without a save", whole()),
    Option("--io-size", "1GiB", "of the file on which the disk alone is measured", SIZE),
    Option("--peers", ",".join(PEERS), f"of {', '.join(PEERS)}; or none", peers_of(PEERS)),
)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures all in turns. Raises ValueError, OSError or a hetero error for input that cannot be
    measured."""
    peers = arguments.peers
    shape = Shape.of(arguments.io_size, BLOCK_BYTES, DEPTH)
    options = steady_options(arguments)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(measured_file(arguments.path, shape.size_bytes))
        temporary = tempfile.TemporaryDirectory(prefix="hetero-bench-", dir=arguments.path)
        folder = Path(stack.enter_context(temporary))
        run_folder = stack.enter_context(RunFolder(str(folder)))
        job = stack.enter_context(open_job(options, run_folder))
        disk = stack.enter_context(HeteroTransfers(_io_engine(), file, shape))
        own = HeteroCheckpoints(job, folder)
        contenders: dict[str, Callable[[], Sample]] = {
            "save": own.save,
            "disk save": lambda: disk.sample_share(own.read_share["save"]),
            "load": own.load,
            "disk load": lambda: disk.sample_share(own.read_share["load"]),
            "step": partial(own.step, arguments.steps),
            "beside": own.beside,
        }
        for program, names in PROGRAMS.items():
            chosen = [peer for peer in peers if peer in names]
            if chosen:
                process = stack.enter_context(_peer_process(program, options, folder))
                contenders |= _peer_contenders(chosen, process, arguments.steps)
        own.warm_up()
        rounds = run_rounds(contenders, arguments.rounds)
        result = {
            "model": model_label(options),
            "policy": options.policy,
            "params": job.setting.params,
            "dtype": job.setting.dtype,
            "budget_bytes": job.setting.budget_bytes,
            "io_engine": disk.engine.kind,
            **summarize(rounds),
        }
    notes = left_out(rounds.failed)
    return result | {"notes": notes, "steps": arguments.steps, "rounds": arguments.rounds}


def _io_engine() -> str:
    """The kind that checkpoints are written and read with."""
    engine, _ = make_io_engine("auto")
    engine.close()
    return engine.kind


def _peer_process(program: str, options: TrainOptions, folder: Path) -> PeerProcess:
    workload = folder / "workload.json"
    write_workload(options, workload)
    checkpoints = folder / "peers"
    checkpoints.mkdir(exist_ok=True)
    return PeerProcess(
        (sys.executable, "-m", f"bench.peers.{program}"),
        {"workload": os.path.abspath(workload), "folder": os.path.abspath(checkpoints)},
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


def summarize(rounds: Rounds) -> dict[str, Any]:
    """Medians over the rounds, and the largest of memory; limits and ratios are taken within each
    round. What was left out has no figures."""
    result: dict[str, Any] = {what: _of_the_disk(rounds, what) for what in ("save", "load")}
    result["checkpoint_bytes"] = result["save"]["bytes"]
    result["beside"] = _beside(rounds, "step", "beside")
    result["peers"] = {}
    for peer in PEERS:
        found: dict[str, Any] = {}
        for what in ("save", "load"):
            name = f"{peer} {what}"
            if name in rounds.samples:
                faster = rounds.ratio(what, name, "gbps")
                found[what] = {**_transfer(rounds, name), "hetero_is_faster_by": faster}
        if {f"{peer} step", f"{peer} beside"} <= rounds.samples.keys():
            found["beside"] = _beside(rounds, f"{peer} step", f"{peer} beside")
        if found:
            result["peers"][peer] = found
    return result


def _transfer(rounds: Rounds, name: str) -> dict[str, Any]:
    return {
        "s": rounds.median(name, "s"),
        "gbps": rounds.median(name, "gbps"),
        "bytes": rounds.median(name, "bytes"),
        "above_bytes": max(rounds.values(name, "above_bytes")),
        "range_s": rounds.spread(name, "s"),
    }


def _of_the_disk(rounds: Rounds, what: str) -> dict[str, Any]:
    """Of hetero's save or load, with what the disk alone takes for it."""
    own, disk = rounds.samples[what], rounds.samples[f"disk {what}"]
    limits_s = [
        (sample["read_bytes"] + sample["written_bytes"]) / (alone["gbps"] * 1e9)
        for sample, alone in zip(own, disk, strict=True)
    ]
    return {
        **_transfer(rounds, what),
        "disk_bytes": {
            "read": rounds.median(what, "read_bytes"),
            "written": rounds.median(what, "written_bytes"),
        },
        "disk_gbps": rounds.median(f"disk {what}", "gbps"),
        "disk_s": statistics.median(limits_s),
        "of_the_disk": statistics.median(
            limit_s / sample["s"] for limit_s, sample in zip(limits_s, own, strict=True)
        ),
        "range_disk_gbps": rounds.spread(f"disk {what}", "gbps"),
    }


def _beside(rounds: Rounds, alone: str, beside: str) -> dict[str, Any]:
    """Steps with and without a save; "lost_s" is what the save cost of training."""
    pairs = list(zip(rounds.samples[alone], rounds.samples[beside], strict=True))
    return {
        "alone_s": rounds.median(alone, "step_s"),
        "beside_s": rounds.median(beside, "step_s"),
        "slower_by": rounds.ratio(beside, alone, "step_s"),
        "steps": rounds.median(beside, "steps"),
        "save_s": rounds.median(beside, "save_s"),
        "pause_s": rounds.median(beside, "pause_s"),
        "lost_s": statistics.median(
            saving["pause_s"] + saving["steps"] * (saving["step_s"] - plain["step_s"])
            for plain, saving in pairs
        ),
        "alone_above_bytes": max(rounds.values(alone, "above_bytes")),
        "above_bytes": max(rounds.values(beside, "above_bytes")),
        "range_alone_s": rounds.spread(alone, "step_s"),
        "range_beside_s": rounds.spread(beside, "step_s"),
    }


def show(result: dict[str, Any]) -> Iterator[str]:
    """A table of saves and loads, one of steps, and what was left out."""
    size = format_bytes
    rows = [["", "seconds", "GB/s", "bytes", "memory", "/ disk", "hetero / it"]]
    limits = []
    for what in ("save", "load"):
        own = result[what]
        moved = own["disk_bytes"]
        rows.append([f"hetero {what}", *_transfer_cells(own), f"{own['of_the_disk']:.2f}", ""])
        limits.append(
            f"{what}, by the disk: {own['disk_s']:.2f} s for {size(round(moved['read']))} read"
            f" and {size(round(moved['written']))} written at {own['disk_gbps']:.2f} GB/s"
        )
    for name, peer in result["peers"].items():
        for what in ("save", "load"):
            if what in peer:
                factor = f"{peer[what]['hetero_is_faster_by']:.2f}"
                rows.append([f"{name} {what}", *_transfer_cells(peer[what]), "", factor])
    yield titled(
        f"bench.checkpoint: {result['model']} {result['policy']},"
        f" {result['params'] / 1e6:.0f}M parameters, {result['dtype']}, median of"
        f" {result['rounds']} rounds (least-most)",
        rows,
    )
    yield from limits
    rows = [["", "step alone", "beside", "slower by", "steps beside", "save", "pause", "lost",
             "memory alone", "memory beside"]]  # fmt: skip
    peers = {name: peer["beside"] for name, peer in result["peers"].items() if "beside" in peer}
    for name, figures in {"hetero": result["beside"], **peers}.items():
        rows.append(
            [
                name,
                ranged(figures["range_alone_s"]),
                ranged(figures["range_beside_s"]),
                f"{figures['slower_by']:.2f}",
                f"{figures['steps']:g}",
                *(f"{figures[key]:.2f}" for key in ("save_s", "pause_s", "lost_s")),
                *(f"{figures[key] / MIB:.0f} MiB" for key in ("alone_above_bytes", "above_bytes")),
            ]
        )
    yield titled("steps beside a save, and without; seconds", rows)
    yield from result["notes"]


def _transfer_cells(figures: dict[str, Any]) -> tuple[str, ...]:
    return (
        ranged(figures["range_s"]),
        f"{figures['gbps']:.2f}",
        format_bytes(round(figures["bytes"])),
        f"{figures['above_bytes'] / MIB:.0f} MiB",
    )


PROGRAM = Program("bench.checkpoint", __doc__, OPTIONS, run, show)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
