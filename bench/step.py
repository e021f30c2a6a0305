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
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bench.harness.peer_process import PeerProcess
from bench.harness.program import Program, left_out, options, peer_options
from bench.harness.rounds import Sample, run_rounds
from bench.harness.tables import Column, Table, number, ranged, shown, size
from bench.work.bandwidths import disk_alone, memory_alone
from bench.work.curve import draw_curve, measure_curve
from bench.work.step_model import UPDATE_BYTES, HeteroStep, make_plan
from offload import _native

PEERS = ("deepspeed",)
DISK, MEMORY = "disk alone", "memory alone"

OPTIONS = options(
    """
    --params       COUNT  500e6           of the model
    --host-memory  SIZE   512MiB          RAM for buffers
    --path         DIR    .               directory on NVMe
    --rounds       N      5               after one of warm-up
    --steps        N      3               per sample, one after the other
    --chunk-numel  N      -               elements per chunk (default: what hetero chooses)
    --io-size      SIZE   1GiB            of the file on which the disk alone is measured
    --curve        FLAG   -               also measure and draw traffic against budgets
    --picture      FILE   step-curve.png  of the curve
    """
) + peer_options(PEERS, default="none")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures all contenders in turns, and the curve if asked for.

    Raises ValueError, OSError or a hetero error for input that cannot be measured.
    """
    numel, budget = arguments.params, arguments.host_memory
    plan = make_plan(numel, budget, arguments.path, arguments.chunk_numel)
    with contextlib.ExitStack() as stack:
        step = stack.enter_context(HeteroStep(numel, plan))
        disk = stack.enter_context(disk_alone(arguments.path, arguments.io_size))
        contenders: dict[str, Callable[[], Sample]] = {
            "hetero": partial(step.sample, arguments.steps),
            DISK: partial(disk, 0.5),
            MEMORY: memory_alone(),
        }
        for peer in arguments.peers:
            swap = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="hetero-bench-swap-", dir=arguments.path)
            )
            process = stack.enter_context(
                PeerProcess(
                    (arguments.peer_python, "-m", f"bench.peers.{peer}_step"),
                    {"params": step.params, "swap_folder": swap, "threads": _native.threads()},
                )
            )
            contenders[peer] = partial(process.sample, steps=arguments.steps)
        rounds = run_rounds(contenders, arguments.rounds)
        rounds.derive("hetero", partial(of_bound, step.params))
        rounds.compare("hetero", "step_s", "of_hetero")
        result: dict[str, Any] = {
            "params": step.params,
            "contenders": rounds.figures(),
            "peak_managed_bytes": step.peak_managed_bytes,
            "io_engine": step.io_engine,
            "host_memory": budget,
            "resident_bytes": plan.resident_bytes,
            "buffers": plan.buffers,
            "optim_states": plan.optim_states,
            "optim_state_bytes": plan.optim_state_bytes,
            "chunk_numel": plan.layout.slot_numel,
        }
    notes = [
        f"RAM: {size(result['peak_managed_bytes'])} of {size(budget)} for buffers,"
        f" {size(plan.resident_bytes)} of parameters and gradients",
        *step.notes,
        *left_out(rounds.failed),
    ]
    if arguments.curve:
        result["curve"] = measure_curve(
            numel, arguments.path, arguments.chunk_numel, arguments.steps
        )
        draw_curve(result["curve"], result["params"], arguments.picture)
        notes.append(os.path.abspath(arguments.picture))
    return result | {"steps": arguments.steps, "rounds": arguments.rounds, "notes": notes}


def of_bound(params: int, made: Mapping[str, Sample]) -> Sample:
    """Seconds that disk and memory need for a step at least, and the larger ones over its own."""
    step = made["hetero"]
    disk_s = (step["read_bytes"] + step["written_bytes"]) / (made[DISK]["gbps"] * 1e9)
    memory_s = params * UPDATE_BYTES / (made[MEMORY]["gbps"] * 1e9)
    bound_s = max(disk_s, memory_s)
    share = bound_s / step["step_s"]
    return {"disk_s": disk_s, "memory_s": memory_s, "bound_s": bound_s, "share_of_bound": share}


def _title(result: Mapping[str, Any]) -> str:
    return (
        f"bench.step: {result['params'] / 1e6:.0f}M parameters, {result['buffers']} buffers of"
        f" {size(result['optim_state_bytes'])} for {result['optim_states']} optimizer states,"
        f" median of {result['rounds']} rounds of {result['steps']} steps"
    )


STEPS = Table(
    _title,
    "contenders",
    (
        Column("step s", "step_s", ranged(3)),
        Column("/ hetero", "of_hetero", number()),
        Column("bound s", "bound_s", number(3)),
        Column("bound / step", "share_of_bound", number(3)),
        Column("disk s", "disk_s", number(3)),
        Column("memory s", "memory_s", number(3)),
        Column("read", "read_bytes", size),
        Column("written", "written_bytes", size),
        Column("GB/s", "gbps", ranged()),
    ),
)
CURVE = Table(
    lambda _: "traffic of a step against RAM for buffers",
    lambda result: {size(point["host_memory"]): point for point in result.get("curve", ())},
    (
        Column("read", "read_bytes", size),
        Column("written", "written_bytes", size),
        Column("theory, together", "theory_bytes", size),
        Column("step s", "step_s", number(3)),
    ),
)
PROGRAM = Program("bench.step", __doc__, OPTIONS, run, shown(STEPS, CURVE))
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
