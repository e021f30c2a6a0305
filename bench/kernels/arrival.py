"""A gradient's arrival where it is kept, with the sum of its squares on the way, beside torch.

usage: python -m bench.kernels.arrival [--numel 16Mi] [--threads T] [--rounds N] [--json]

"copy" and "add" are torch's copy_() and add_(); "then sum" adds the pass over what is kept that a
norm would need; "and sum" is hetero's, which does both in one pass with the same bits. They take
turns; a turn is one call of warm-up and --repeats timed ones. Ratios are taken within a round. Run
it with OMP_WAIT_POLICY=passive, or torch's threads disturb hetero's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from bench.harness.machine import describe_machine
from bench.harness.program import (
    add_json_argument,
    command_line,
    parse_count,
    print_header,
    program_parser,
    run_program,
)
from bench.harness.rounds import run_rounds
from bench.work.updates import Updates
from offload import _native

if TYPE_CHECKING:
    from offload._native import DtypeName

# What backward gives, and what is kept.
PAIRS: tuple[tuple[DtypeName, DtypeName], ...] = (
    ("bf16", "bf16"),
    ("fp16", "fp16"),
    ("fp32", "fp32"),
    ("bf16", "fp32"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 when something about the input is wrong."""
    parser = program_parser("bench.kernels.arrival", __doc__)
    parser.add_argument("--numel", default="16Mi", help="elements (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="of hetero and torch (default: usable CPUs)")
    parser.add_argument("--rounds", type=int, default=7, help="(default: %(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed calls per turn (default: %(default)s)"
    )
    add_json_argument(parser)
    arguments = parser.parse_args(argv)
    command = command_line("bench.kernels.arrival", argv)
    return run_program(
        "bench.kernels.arrival", lambda: run(arguments, command), show, arguments.json
    )


def run(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    """All figures. Raises ValueError for input that cannot be measured."""
    numel = parse_count("--numel", arguments.numel)
    threads = _native.usable_cpus() if arguments.threads is None else arguments.threads
    for option, value in (
        ("threads", threads),
        ("rounds", arguments.rounds),
        ("repeats", arguments.repeats),
    ):
        if value < 1:
            raise ValueError(f"--{option} must be 1 or more, got {value}")
    _native.set_threads(threads)
    torch.set_num_threads(threads)
    updates = Updates(numel, arguments.repeats)
    pairs = []
    for source_dtype, dtype in PAIRS:
        variants = {v.name: v.sample for v in updates.writes(source_dtype, dtype)}
        rounds = run_rounds(variants, arguments.rounds)
        ratios = {
            f"{verb} and sum / {other}": rounds.ratio(other, f"{verb} and sum", "params_per_s")
            for verb in ("copy", "add")
            for other in (verb, f"{verb}, then sum")
        }
        seconds = {name: numel / rounds.median(name, "params_per_s") for name in variants}
        pairs.append({"of": f"{source_dtype} to {dtype}", "seconds": seconds, "ratios": ratios})
    return {
        "pairs": pairs,
        "threads": threads,
        "isa": _native.isa(),
        "numel": numel,
        "rounds": arguments.rounds,
        "repeats": arguments.repeats,
        "machine": describe_machine(),
        "command": command,
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Milliseconds of each, and the ratios of their times."""
    print_header(result, console)
    for what, factor, digits in (("seconds", 1e3, 2), ("ratios", 1.0, 2)):
        title = "ms" if what == "seconds" else "ratios of times"
        table = Table(
            title=f"bench.kernels.arrival: {result['numel']:,} elements,"
            f" {result['threads']} threads, {title}, median of {result['rounds']}",
            title_justify="left",
        )
        table.add_column("gradient", no_wrap=True)
        for name in result["pairs"][0][what]:
            table.add_column(name, justify="right", no_wrap=True)
        for pair in result["pairs"]:
            figures = [f"{factor * value:.{digits}f}" for value in pair[what].values()]
            table.add_row(pair["of"], *figures)
        console.print(table)


if __name__ == "__main__":
    sys.exit(main())
