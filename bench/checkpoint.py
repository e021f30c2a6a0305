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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.harness.machine import describe_machine
from bench.harness.peer_process import PeerProcess
from bench.harness.program import (
    add_json_argument,
    chosen_peers,
    command_line,
    parse_size,
    print_header,
    program_parser,
    run_program,
)
from bench.harness.rounds import Rounds, Sample, run_rounds
from bench.train import write_workload
from bench.work.checkpoints import HeteroCheckpoints
from bench.work.job_steps import steady_options
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
POLICIES = ("nvme", "cpu")

# The I/O engine of a checkpoint has these; the yardstick must not have less in flight.
DEPTH = 32
BLOCK_BYTES = 1 << 20

MIB = 1 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 when something about the input is wrong."""
    arguments = _parser().parse_args(argv)
    command = command_line("bench.checkpoint", argv)
    return run_program("bench.checkpoint", lambda: run(arguments, command), show, arguments.json)


def _parser() -> argparse.ArgumentParser:
    parser = program_parser("bench.checkpoint", __doc__)
    parser.add_argument(
        "--model",
        default="gpt2-medium",
        help="as of hetero train, with its published vocabulary (default: %(default)s)",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="JSON file with a model's configuration, instead"
    )
    parser.add_argument(
        "--policy",
        choices=POLICIES,
        default=POLICIES[0],
        help="where hetero's state is: in RAM and on NVMe, or all in RAM (default: %(default)s)",
    )
    parser.add_argument(
        "--host-memory",
        metavar="BYTES",
        help="RAM budget of hetero's state (default: with policy nvme a third of 16 bytes a"
        " parameter, 256MiB at least; else no limit)",
    )
    parser.add_argument(
        "--path",
        default=".",
        metavar="DIR",
        help="directory on NVMe for checkpoints and state; all is removed in the end"
        " (default: the current one)",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="after one of warm-up (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=3, help="in a row, without a save (default: %(default)s)"
    )
    parser.add_argument(
        "--seq-len",
        type=int,
        default=128,
        help="tokens of a step, which is one sequence (default: %(default)s)",
    )
    parser.add_argument(
        "--io-size",
        default="1GiB",
        metavar="SIZE",
        help="of the file on which the disk alone is measured (default: %(default)s)",
    )
    parser.add_argument(
        "--peers",
        default=",".join(PEERS),
        metavar="LIST",
        help=f"of {', '.join(PEERS)}; or none (default: all)",
    )
    add_json_argument(parser)
    return parser


def run(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measures all in turns. Raises ValueError, OSError or a hetero error for input that cannot be
    measured."""
    if arguments.rounds < 1 or arguments.steps < 1:
        raise ValueError("--rounds and --steps must be 1 or more")
    peers = chosen_peers(arguments.peers, PEERS)
    shape = Shape.of(parse_size("--io-size", arguments.io_size), BLOCK_BYTES, DEPTH)
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
    notes = [f"{name}: left out: {why}" for name, why in rounds.failed.items()]
    return result | {"notes": notes, "steps": arguments.steps, "rounds": arguments.rounds,
                     "machine": describe_machine(), "command": command}  # fmt: skip


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


def show(result: dict[str, Any], console: Console) -> None:
    """Prints a table of saves and loads, one of steps, and what was left out."""
    print_header(result, console)
    console.print(_transfer_table(result))
    console.print(_step_table(result))
    for note in result["notes"]:
        console.print(note, markup=False, highlight=False)


def _transfer_table(result: dict[str, Any]) -> Table:
    size = format_bytes
    table = Table(
        title=f"bench.checkpoint: {result['model']} {result['policy']},"
        f" {result['params'] / 1e6:.0f}M parameters, {result['dtype']}, median of"
        f" {result['rounds']} rounds (least-most)",
        title_justify="left",
    )
    for heading in ("", "seconds", "GB/s", "bytes", "memory", "", "of"):
        table.add_column(heading, justify="left" if heading in ("", "of") else "right")
    for what in ("save", "load"):
        own = result[what]
        moved = own["disk_bytes"]
        table.add_row(
            f"hetero {what}",
            *_transfer_cells(own),
            f"{own['of_the_disk']:.2f}",
            f"the disk: {own['disk_s']:.2f} s for {size(round(moved['read']))} read and"
            f" {size(round(moved['written']))} written at {own['disk_gbps']:.2f} GB/s",
        )
    for name, peer in result["peers"].items():
        for what in ("save", "load"):
            if what in peer:
                factor = f"{peer[what]['hetero_is_faster_by']:.2f}"
                cells = _transfer_cells(peer[what])
                table.add_row(f"{name} {what}", *cells, factor, "hetero's rate over this")
    return table


def _transfer_cells(figures: dict[str, Any]) -> tuple[str, ...]:
    return (
        _with_range(figures["s"], figures["range_s"]),
        f"{figures['gbps']:.2f}",
        format_bytes(round(figures["bytes"])),
        f"{figures['above_bytes'] / MIB:.0f} MiB",
    )


def _step_table(result: dict[str, Any]) -> Table:
    table = Table(title="steps beside a save, and without; seconds", title_justify="left")
    headings = ("", "step alone", "beside", "slower by", "steps beside", "save", "pause", "lost",
                "memory alone", "memory beside")  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    peers = {name: peer["beside"] for name, peer in result["peers"].items() if "beside" in peer}
    for name, figures in {"hetero": result["beside"], **peers}.items():
        table.add_row(
            name,
            _with_range(figures["alone_s"], figures["range_alone_s"]),
            _with_range(figures["beside_s"], figures["range_beside_s"]),
            f"{figures['slower_by']:.2f}",
            f"{figures['steps']:g}",
            f"{figures['save_s']:.2f}",
            f"{figures['pause_s']:.2f}",
            f"{figures['lost_s']:.2f}",
            *(f"{figures[key] / MIB:.0f} MiB" for key in ("alone_above_bytes", "above_bytes")),
        )
    return table


def _with_range(median: float, spread: dict[str, float]) -> str:
    return f"{median:.2f} ({spread['min']:.2f}-{spread['max']:.2f})"


if __name__ == "__main__":
    sys.exit(main())
