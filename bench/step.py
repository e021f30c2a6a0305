"""The optimizer step over state on NVMe, beside the time that disk and memory need at least.

usage: python -m bench.step --params 500e6 --host-memory 512MiB --path DIR
                            [--peers deepspeed] [--peer-python PY] [--curve] [--json]

bf16 parameters and gradients (4 bytes a parameter) stay in RAM and are reported apart; --host-
memory is for the pipeline's buffers, which keep optimizer states between steps. A sample is several
steps in a row until their last write is done. The bound, measured in the same round, is the larger
of the step's disk traffic at the rate at which the same I/O engine moves it alone ("mixed" of
bench.io), and of the bytes that the update moves in RAM, 26 a parameter, at the rate of a kernel
that does nothing else. What the disk's own transfers move in RAM is not counted in the bound.
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
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.harness.machine import describe_machine, header
from bench.harness.peer_process import PeerProcess
from bench.harness.program import (
    add_json_argument,
    add_peer_arguments,
    chosen_peers,
    command_line,
    parse_count,
    parse_size,
    program_parser,
    run_program,
)
from bench.harness.rounds import Rounds, Sample, run_rounds
from bench.work.bandwidths import MemoryBandwidth
from bench.work.curve import draw_curve, measure_curve
from bench.work.step_model import UPDATE_BYTES, HeteroStep, Plan, make_plan
from bench.work.transfers import HeteroTransfers, Shape, measured_file
from offload import _native
from offload.memory.sizes import format_bytes

PEERS = ("deepspeed",)
DEEPSPEED_INSTALL = (
    "python -m venv VENV && VENV/bin/pip install torch deepspeed setuptools ninja (and the"
    " system's libaio-dev), then --peer-python VENV/bin/python"
)

# The engine of hetero.initialize() has these; the yardstick must not have less in flight.
DEPTH = 32
BLOCK_BYTES = 1 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 when something about the input is wrong."""
    arguments = _parser().parse_args(argv)
    command = command_line("bench.step", argv)
    return run_program("bench.step", lambda: run(arguments, command), show, arguments.json)


def _parser() -> argparse.ArgumentParser:
    parser = program_parser("bench.step", __doc__)
    parser.add_argument("--params", default="500e6", help="of the model (default: %(default)s)")
    parser.add_argument(
        "--host-memory", default="512MiB", help="RAM for buffers (default: %(default)s)"
    )
    parser.add_argument(
        "--path", default=".", metavar="DIR", help="directory on NVMe (default: the current one)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="after one of warm-up (default: %(default)s)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=3,
        help="per sample, one after the other (default: %(default)s)",
    )
    parser.add_argument(
        "--chunk-numel", type=int, help="elements per chunk (default: what hetero chooses)"
    )
    parser.add_argument(
        "--io-size",
        default="1GiB",
        metavar="SIZE",
        help="of the file on which the disk alone is measured (default: %(default)s)",
    )
    add_peer_arguments(parser, PEERS, default="none")
    parser.add_argument(
        "--curve", action="store_true", help="also measure and draw traffic against budgets"
    )
    parser.add_argument(
        "--picture",
        default="step-curve.png",
        metavar="FILE",
        help="of the curve (default: %(default)s)",
    )
    add_json_argument(parser)
    return parser


def run(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measures all contenders in turns, and the curve if asked for.

    Raises ValueError, OSError or a hetero error for input that cannot be measured.
    """
    numel = parse_count("--params", arguments.params)
    budget = parse_size("--host-memory", arguments.host_memory)
    peers = chosen_peers(arguments.peers, PEERS)
    if arguments.rounds < 1 or arguments.steps < 1:
        raise ValueError("--rounds and --steps must be 1 or more")
    plan = make_plan(numel, budget, arguments.path, arguments.chunk_numel)
    shape = Shape.of(parse_size("--io-size", arguments.io_size), BLOCK_BYTES, DEPTH)
    with contextlib.ExitStack() as stack:
        step = stack.enter_context(HeteroStep(numel, plan))
        file = stack.enter_context(measured_file(arguments.path, shape.size_bytes))
        disk = stack.enter_context(HeteroTransfers(step.io_engine, file, shape))
        contenders: dict[str, Callable[[], Sample]] = {
            "hetero": lambda: step.sample(arguments.steps),
            "disk": lambda: disk.sample("mixed"),
            "memory": MemoryBandwidth().sample,
        }
        for peer in peers:
            swap = stack.enter_context(_swap_folder(arguments.path))
            process = stack.enter_context(
                PeerProcess(
                    (arguments.peer_python, "-m", f"bench.peers.{peer}_step"),
                    {"params": step.params, "swap_folder": swap, "threads": _native.threads()},
                    DEEPSPEED_INSTALL,
                )
            )
            contenders[peer] = partial(process.sample, steps=arguments.steps)
        rounds = run_rounds(contenders, arguments.rounds)
        result = summarize(rounds, step.params)
        result |= {
            "peak_managed_bytes": step.peak_managed_bytes,
            "io_engine": step.io_engine,
            "notes": [*step.notes, *(f"{n}: left out: {why}" for n, why in rounds.failed.items())],
        }
    result |= describe_plan(plan, budget)
    if arguments.curve:
        points = measure_curve(numel, arguments.path, arguments.chunk_numel, arguments.steps)
        draw_curve(points, result["params"], arguments.picture)
        result |= {"curve": points, "picture": os.path.abspath(arguments.picture)}
    return result | {"steps": arguments.steps, "rounds": arguments.rounds,
                     "machine": describe_machine(), "command": command}  # fmt: skip


def summarize(rounds: Rounds, params: int) -> dict[str, Any]:
    """Medians over the rounds; the bound, its share and ratios are taken within each round."""
    bounds: dict[str, list[float]] = {"disk": [], "memory": [], "bound": []}
    for step, disk, memory in zip(
        *(rounds.samples[name] for name in ("hetero", "disk", "memory")), strict=True
    ):
        moved = step["read_bytes"] + step["written_bytes"]
        bounds["disk"].append(moved / (disk["gbps"] * 1e9))
        bounds["memory"].append(params * UPDATE_BYTES / (memory["gbps"] * 1e9))
        bounds["bound"].append(max(bounds["disk"][-1], bounds["memory"][-1]))
    steps = rounds.values("hetero", "step_s")
    return {
        "params": params,
        "step_s": rounds.median("hetero", "step_s"),
        "bound_s": statistics.median(bounds["bound"]),
        "bounds_s": {name: statistics.median(bounds[name]) for name in ("disk", "memory")},
        "share_of_bound": statistics.median(
            bound / step for bound, step in zip(bounds["bound"], steps, strict=True)
        ),
        "disk_bytes": {
            "read": rounds.median("hetero", "read_bytes"),
            "written": rounds.median("hetero", "written_bytes"),
        },
        "mixed_gbps": rounds.median("disk", "gbps"),
        "stream_gbps": rounds.median("memory", "gbps"),
        "pipeline": {
            name: rounds.median("hetero", name)
            for name in ("compute_s", "read_wait_s", "write_wait_s")
        },
        "ranges": {
            "step_s": rounds.spread("hetero", "step_s"),
            "mixed_gbps": rounds.spread("disk", "gbps"),
            "stream_gbps": rounds.spread("memory", "gbps"),
        },
        "peers": {
            name: {
                "step_s": rounds.median(name, "step_s"),
                "hetero_is_faster_by": rounds.ratio(name, "hetero", "step_s"),
            }
            for name in rounds.samples
            if name not in ("hetero", "disk", "memory")
        },
    }


def describe_plan(plan: Plan, budget: int) -> dict[str, Any]:
    """What the budget came to."""
    return {
        "host_memory": budget,
        "resident_bytes": plan.resident_bytes,
        "buffers": plan.buffers,
        "optim_states": plan.optim_states,
        "optim_state_bytes": plan.optim_state_bytes,
        "chunk_numel": plan.arrangement.chunk_groups[0].layout.slot_numel,
    }


def _swap_folder(directory: str) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="hetero-bench-swap-", dir=directory)


def show(result: dict[str, Any], console: Console) -> None:
    """Prints the table: the step, its bounds, the peers; then what was left out."""
    console.print(
        header(result["machine"], result["command"]), markup=False, highlight=False, soft_wrap=True
    )
    moved, size = result["disk_bytes"], format_bytes
    table = Table(
        title=f"bench.step: {result['params'] / 1e6:.0f}M parameters, {result['buffers']} buffers"
        f" of {size(result['optim_state_bytes'])} for {result['optim_states']} optimizer states, "
        f"median of"
        f" {result['rounds']} rounds of {result['steps']} steps",
        title_justify="left",
    )
    table.add_column("")
    table.add_column("step s", justify="right")
    table.add_column("share", justify="right")
    table.add_column("of", justify="left")
    table.add_row("hetero", f"{result['step_s']:.3f}", f"{result['share_of_bound']:.3f}", "bound")
    table.add_row(
        "disk alone",
        f"{result['bounds_s']['disk']:.3f}",
        "",
        f"{size(moved['read'])} read and {size(moved['written'])} written at"
        f" {result['mixed_gbps']:.2f} GB/s",
    )
    table.add_row(
        "memory alone",
        f"{result['bounds_s']['memory']:.3f}",
        "",
        f"{UPDATE_BYTES} bytes a parameter at {result['stream_gbps']:.1f} GB/s",
    )
    for name, peer in result["peers"].items():
        table.add_row(
            name, f"{peer['step_s']:.3f}", f"{peer['hetero_is_faster_by']:.2f}", "times hetero's"
        )
    console.print(table)
    console.print(
        f"RAM: {size(result['peak_managed_bytes'])} of {size(result['host_memory'])}"
        f" for buffers, {size(result['resident_bytes'])} of parameters and gradients",
        highlight=False,
    )
    for point in result.get("curve", []):
        console.print(
            f"budget {size(point['host_memory'])}: {size(point['read_bytes'])} read,"
            f" {size(point['written_bytes'])} written,"
            f" theory {size(point['theory_bytes'])} together, {point['step_s']:.3f} s",
            highlight=False,
        )
    for note in result["notes"]:
        console.print(note, markup=False, highlight=False)
    if "picture" in result:
        console.print(result["picture"], markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
