"""A step whose activations do not fit, beside the least time that it can take, and recomputing.

usage: python -m bench.activations.bound [--seq-len 4096] [--batch-size 1]
                                         [--process-memory 2560MiB] [--recompute auto,none,all]
                                         [--compute hetero] [--steps N] [--skip-steps N]
                                         [--rounds N] [--policy nvme] [--layers N] [--width N]
                                         [--heads N] [--vocabulary N] [--io-size SIZE]
                                         [--path DIR] [--json]

hetero trains a GPT-2 in bf16 (by default 354 M), its loss in tiles, in processes of their own, in
turns: with everything in RAM and no limit ("in memory"), and within --process-memory with each of
--recompute. The bound of a step is the larger one of two times, both measured in its round:

  compute  the step in memory, or, with --compute torch, PyTorch's, which keeps its logits whole
  NVMe     bytes read and written in the step, those of activations included, at what the same I/O
           engine moves alone when it reads and writes in the step's proportion

So what is recomputed is not in the bound. Ratios are taken within a round and their median given.

Offloading a block's activations takes NVMe time, and recomputing takes the time of the block's
forward; that, and the bytes that autograd saves, are measured in memory. The two cost the same at
the rate "of a block", its bytes over those seconds, if none of the transfer hides behind compute.
If all of it does, a step with all offloaded takes as long as one with all recomputed at the rate
"of a step". Bytes grow with the tokens, and a forward's seconds, with attention, faster than that:
at sequences longer than "crossing at" offloading takes less time than recomputing at the measured
rate, by the operations that are counted; at 0, at any length. "Offloading all" is so far as RAM
does not keep activations.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.activations.crossing import Block, Crossing, crossing
from bench.activations.options import add_counts, add_model_arguments, model_shape, turn
from bench.activations.training import Spec
from bench.activations.trial import run_trial, tell
from bench.harness.machine import describe_machine
from bench.harness.program import (
    add_json_argument,
    command_line,
    names,
    parse_size,
    print_header,
    program_parser,
    run_program,
)
from bench.work.transfers import HeteroTransfers, Shape, measured_file
from offload.memory.sizes import format_bytes

NAME = "bench.activations.bound"
RECOMPUTE = ("auto", "none", "all")
GOAL = 1.25
# The engine of hetero.initialize() has these; the yardstick must not have less in flight.
DEPTH = 32
BLOCK_BYTES = 1 << 20
IN_MEMORY = "in memory"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 when something about the input is wrong."""
    arguments = _parser().parse_args(argv)
    command = command_line(NAME, argv)
    return run_program(NAME, lambda: run(arguments, command), show, arguments.json)


def _parser() -> argparse.ArgumentParser:
    parser = program_parser(NAME, __doc__)
    add_counts(
        parser,
        ("--seq-len", 4096, "tokens of a sequence"),
        ("--batch-size", 1, "sequences"),
        ("--steps", 2, "that count, of each process"),
        ("--skip-steps", 3, "before them, after which what is recomputed is chosen"),
        ("--rounds", 1, "turns of each contender"),
    )
    parser.add_argument("--process-memory", default="2560MiB", metavar="SIZE")
    parser.add_argument("--recompute", default=",".join(RECOMPUTE), metavar="LIST")
    parser.add_argument("--compute", choices=("hetero", "torch"), default="hetero")
    parser.add_argument("--io-size", default="1GiB", metavar="SIZE", help="of the disk's yardstick")
    parser.add_argument(
        "--timeout", type=float, default=1800.0, metavar="SECONDS", help="of a process"
    )
    add_model_arguments(parser)
    add_json_argument(parser)
    return parser


def run(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    """All figures. Raises ValueError for input that cannot be measured, or a failed contender."""
    chosen = names(arguments.recompute)
    for name in chosen:
        if name not in RECOMPUTE:
            raise ValueError(f"unknown {name!r} in --recompute; known: {', '.join(RECOMPUTE)}")
    for option in ("seq_len", "batch_size", "steps", "rounds"):
        if getattr(arguments, option) < 1:
            raise ValueError(f"--{option.replace('_', '-')} must be 1 or more")
    if arguments.skip_steps < 0:
        raise ValueError("--skip-steps must be 0 or more")
    budget = parse_size("--process-memory", arguments.process_memory)
    specs = _specs(arguments, chosen, budget)
    io_shape = Shape.of(parse_size("--io-size", arguments.io_size), BLOCK_BYTES, DEPTH)
    rounds: list[dict[str, dict[str, Any]]] = []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(dir=arguments.path, prefix="bench-activations-bound-")
        )
        file = stack.enter_context(measured_file(folder, io_shape.size_bytes))
        for number in range(arguments.rounds):
            rounds.append({})
            for name in turn(list(specs), number):
                sample = _sample(name, specs[name], folder, arguments.timeout)
                kind = sample["io_engine"]
                if kind is not None:
                    with HeteroTransfers(kind, file, io_shape) as disk:
                        gbps = disk.sample_share(_read_share(sample["bytes_per_step"]))["gbps"]
                    sample["nvme_gbps"] = gbps
                rounds[-1][name] = sample
    results = summarize(rounds, budget)
    return {
        "machine": describe_machine(),
        "command": command,
        "shape": specs[IN_MEMORY].shape | {"vocabulary": arguments.vocabulary},
        "process_memory": budget,
        "goal": GOAL,
        "results": results,
        "crossing": _crossing(results, specs[IN_MEMORY].shape),
        "samples": rounds,
    }


def _specs(arguments: argparse.Namespace, chosen: Sequence[str], budget: int) -> dict[str, Spec]:
    shape = vars(model_shape(arguments, arguments.seq_len, arguments.batch_size))
    steps = {
        "steps": arguments.steps + arguments.skip_steps,
        "skip_steps": arguments.skip_steps,
    }
    in_memory = {"placement_policy": "cpu"} if arguments.compute == "hetero" else {}
    specs = {
        IN_MEMORY: Spec(
            arguments.compute, shape, arguments.vocabulary, in_memory, measure_blocks=True, **steps
        )
    }
    for recompute in chosen:
        options = {
            "recompute": recompute,
            "placement_policy": arguments.policy,
            "process_memory": budget,
        }
        specs[recompute] = Spec("hetero", shape, arguments.vocabulary, options, **steps)
    return specs


def _sample(name: str, spec: Spec, folder: str, timeout_s: float) -> dict[str, Any]:
    sample = run_trial(spec, folder, timeout_s)
    if sample["status"] != "trained":
        raise ValueError(f"{name}: {sample['status']}: {sample['error']}")
    peak = format_bytes(sample["peak_bytes"])
    tell(NAME, f"{name}: {sample['step_s']:.2f} s a step, peak {peak}, {sample['seconds']:.0f} s")
    return sample


def _nvme_bytes(moved: Mapping[str, float]) -> float:
    return moved.get("disk_read", 0) + moved.get("disk_write", 0)


def _activation_bytes(moved: Mapping[str, float]) -> float:
    return moved.get("activations_read", 0) + moved.get("activations_written", 0)


def _read_share(moved: Mapping[str, float]) -> float:
    nbytes = _nvme_bytes(moved)
    return moved["disk_read"] / nbytes if nbytes else 0.5


def summarize(rounds: Sequence[Mapping[str, Any]], budget: int) -> dict[str, dict[str, Any]]:
    """Medians over the rounds; the bound and the ratio are taken within each round."""
    results = {}
    for name in rounds[0]:
        samples = [each[name] for each in rounds]
        bounds, ratios = [], []
        for each, sample in zip(rounds, samples, strict=True):
            compute_s = each[IN_MEMORY]["step_s"]
            nvme_s = 0.0
            if "nvme_gbps" in sample:
                nvme_s = _nvme_bytes(sample["bytes_per_step"]) / (sample["nvme_gbps"] * 1e9)
            bounds.append({"compute_s": compute_s, "nvme_s": nvme_s})
            ratios.append(sample["step_s"] / max(compute_s, nvme_s))
        parts = {part: statistics.median(b[part] for b in bounds) for part in bounds[0]}
        moved = {
            key: statistics.median(s["bytes_per_step"][key] for s in samples)
            for key in samples[0]["bytes_per_step"]
        }
        peak = max(sample["peak_bytes"] for sample in samples)
        found = {
            "step_s": statistics.median(s["step_s"] for s in samples),
            "forward_s": statistics.median(s["forward_s"] for s in samples),
            **parts,
            "bound_s": statistics.median(max(b.values()) for b in bounds),
            "bound": "NVMe" if parts["nvme_s"] > parts["compute_s"] else "compute",
            "ratio": statistics.median(ratios),
            "peak_bytes": peak,
            "is_within": None if name == IN_MEMORY else peak <= budget,
            "bytes_per_step": moved,
            "state_bytes": _nvme_bytes(moved) - _activation_bytes(moved),
            "activation_bytes": _activation_bytes(moved),
            "explained": samples[-1]["explained"],
        }
        if name == IN_MEMORY:
            seconds = statistics.median(s["blocks"]["forward_s"] for s in samples)
            found["blocks"] = samples[0]["blocks"] | {"forward_s": seconds}
        if "nvme_gbps" in samples[0]:
            found["nvme_gbps"] = statistics.median(s["nvme_gbps"] for s in samples)
        results[name] = found
    return results


def _crossing(
    results: Mapping[str, Mapping[str, Any]], shape: Mapping[str, int]
) -> dict[str, Any] | None:
    """None where nothing was on NVMe, whose rate is then not known."""
    measured = next((each for each in results.values() if "nvme_gbps" in each), None)
    blocks = results[IN_MEMORY]["blocks"]
    if measured is None:
        return None
    none, every = (results.get(name) for name in ("none", "all"))
    block = Block(
        width=shape["width"],
        seq_len=shape["seq_len"],
        forward_s=blocks["forward_s"] / shape["layers"],
        nbytes=2 * (blocks["saved_bytes"] - blocks["input_bytes"]) / shape["layers"],
    )
    compute_s = results[IN_MEMORY]["step_s"]
    found: Crossing = crossing(
        block,
        layers=shape["layers"],
        compute_s=compute_s,
        state_bytes=measured["state_bytes"],
        nvme_gbps=measured["nvme_gbps"],
    )
    return {
        **vars(found),
        "block_bytes": block.nbytes,
        "block_forward_s": block.forward_s,
        "nvme_gbps": measured["nvme_gbps"],
        "offloading_s": None if none is None else none["step_s"] - compute_s,
        "recomputing_s": None if every is None else every["step_s"] - compute_s,
    }


def show(result: dict[str, Any], console: Console) -> None:
    """The table for people, and the crossings."""
    print_header(result, console)
    shape, size = result["shape"], format_bytes
    table = Table(
        title=f"{NAME}: {shape['layers']} layers of {shape['width']}, {shape['batch_size']} x"
        f" {shape['seq_len']:,} tokens, process_memory {size(result['process_memory'])}",
        title_justify="left",
    )
    for title in ("recompute", "step, s", "bound, s", "by", "step / bound", "peak",
                  "NVMe, GB/s", "state moved", "activations moved"):  # fmt: skip
        table.add_column(title, justify="left" if title in ("recompute", "by") else "right")
    for name, figures in result["results"].items():
        beyond = " (beyond)" if figures["is_within"] is False else ""
        table.add_row(
            name,
            f"{figures['step_s']:.2f}",
            f"{figures['bound_s']:.2f}",
            figures["bound"],
            f"{figures['ratio']:.2f}",
            size(figures["peak_bytes"]) + beyond,
            f"{figures['nvme_gbps']:.2f}" if "nvme_gbps" in figures else "",
            size(figures["state_bytes"]),
            size(figures["activation_bytes"]),
        )
    console.print(table)
    crossing = result["crossing"]
    if crossing is None:
        console.print("nothing was on NVMe: no crossing", highlight=False)
        return
    for what, key in (("offloading", "offloading_s"), ("recomputing", "recomputing_s")):
        if crossing[key] is not None:
            console.print(f"{what} all: {crossing[key]:+.2f} s a step", highlight=False)
    console.print(
        f"a block: {size(crossing['block_bytes'])} of activations there and back, forward"
        f" {crossing['block_forward_s']:.3f} s\nboth cost the same at"
        f" {crossing['block_gbps']:.2f} GB/s of NVMe of a block,"
        f" {crossing['step_gbps']:.2f} GB/s of a step; crossing at"
        f" {crossing['seq_len']:,.0f} tokens at the measured {crossing['nvme_gbps']:.2f} GB/s",
        highlight=False,
    )


if __name__ == "__main__":
    sys.exit(main())
