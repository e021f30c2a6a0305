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
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from bench.harness.peer_process import DEEPSPEED_INSTALL, PeerProcess
from bench.harness.program import (
    COUNT,
    FILE,
    FOLDER,
    SIZE,
    Option,
    Program,
    left_out,
    peer_options,
    titled,
    whole,
)
from bench.harness.rounds import Rounds, Sample, run_rounds
from bench.work.bandwidths import MemoryBandwidth
from bench.work.curve import draw_curve, measure_curve
from bench.work.step_model import UPDATE_BYTES, HeteroStep, Plan, make_plan
from bench.work.transfers import HeteroTransfers, Shape, measured_file
from offload import _native
from offload.memory.sizes import format_bytes

PEERS = ("deepspeed",)
# The engine of hetero.initialize() has these; the yardstick must not have less in flight.
DEPTH = 32
BLOCK_BYTES = 1 << 20


OPTIONS = (
    Option("--params", "500e6", "of the model", COUNT),
    Option("--host-memory", "512MiB", "RAM for buffers", SIZE),
    Option("--path", ".", "directory on NVMe", FOLDER),
    Option("--rounds", "5", "after one of warm-up", whole()),
    Option("--steps", "3", "per sample, one after the other", whole()),
    Option("--chunk-numel", None, "elements per chunk (default: what hetero chooses)", whole()),
    Option("--io-size", "1GiB", "of the file on which the disk alone is measured", SIZE),
    *peer_options(PEERS, default="none"),
    Option("--curve", False, "also measure and draw traffic against budgets"),
    Option("--picture", "step-curve.png", "of the curve", FILE),
)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures all contenders in turns, and the curve if asked for.

    Raises ValueError, OSError or a hetero error for input that cannot be measured.
    """
    numel, budget = arguments.params, arguments.host_memory
    plan = make_plan(numel, budget, arguments.path, arguments.chunk_numel)
    shape = Shape.of(arguments.io_size, BLOCK_BYTES, DEPTH)
    with contextlib.ExitStack() as stack:
        step = stack.enter_context(HeteroStep(numel, plan))
        file = stack.enter_context(measured_file(arguments.path, shape.size_bytes))
        disk = stack.enter_context(HeteroTransfers(step.io_engine, file, shape))
        contenders: dict[str, Callable[[], Sample]] = {
            "hetero": lambda: step.sample(arguments.steps),
            "disk": lambda: disk.sample("mixed"),
            "memory": MemoryBandwidth().sample,
        }
        for peer in arguments.peers:
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
            "notes": [*step.notes, *left_out(rounds.failed)],
        }
    result |= describe_plan(plan, budget)
    if arguments.curve:
        points = measure_curve(numel, arguments.path, arguments.chunk_numel, arguments.steps)
        draw_curve(points, result["params"], arguments.picture)
        result |= {"curve": points, "picture": os.path.abspath(arguments.picture)}
    return result | {"steps": arguments.steps, "rounds": arguments.rounds}


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


def show(result: dict[str, Any]) -> Iterator[str]:
    """The table: the step, its bounds, the peers; then what was left out."""
    moved, size = result["disk_bytes"], format_bytes
    rows = [
        ["", "step s", "share", ""],
        ["hetero", f"{result['step_s']:.3f}", f"{result['share_of_bound']:.3f}", "of the bound"],
        [
            "disk alone",
            f"{result['bounds_s']['disk']:.3f}",
            "",
            f"{size(moved['read'])} read and {size(moved['written'])} written at"
            f" {result['mixed_gbps']:.2f} GB/s",
        ],
        [
            "memory alone",
            f"{result['bounds_s']['memory']:.3f}",
            "",
            f"{UPDATE_BYTES} bytes a parameter at {result['stream_gbps']:.1f} GB/s",
        ],
    ]
    for name, peer in result["peers"].items():
        faster = f"{peer['hetero_is_faster_by']:.2f}"
        rows.append([name, f"{peer['step_s']:.3f}", faster, "times hetero's"])
    yield titled(
        f"bench.step: {result['params'] / 1e6:.0f}M parameters, {result['buffers']} buffers"
        f" of {size(result['optim_state_bytes'])} for {result['optim_states']} optimizer states,"
        f" median of {result['rounds']} rounds of {result['steps']} steps",
        rows,
    )
    yield (
        f"RAM: {size(result['peak_managed_bytes'])} of {size(result['host_memory'])}"
        f" for buffers, {size(result['resident_bytes'])} of parameters and gradients"
    )
    for point in result.get("curve", []):
        yield (
            f"budget {size(point['host_memory'])}: {size(point['read_bytes'])} read,"
            f" {size(point['written_bytes'])} written,"
            f" theory {size(point['theory_bytes'])} together, {point['step_s']:.3f} s"
        )
    yield from result["notes"]
    if "picture" in result:
        yield result["picture"]


PROGRAM = Program("bench.step", __doc__, OPTIONS, run, show)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
