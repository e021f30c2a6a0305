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
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from bench.harness.program import COUNT, Option, Program, titled, whole
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


OPTIONS = (
    Option("--numel", "16Mi", "elements", COUNT),
    Option("--threads", None, "of hetero and torch (default: usable CPUs)", whole()),
    Option("--rounds", "7", "after one of warm-up", whole()),
    Option("--repeats", "3", "timed calls per turn", whole()),
)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    numel, threads = arguments.numel, arguments.threads or _native.usable_cpus()
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
    }


def show(result: dict[str, Any]) -> Iterator[str]:
    """Milliseconds of each, and the ratios of their times."""
    for what, factor, title in (("seconds", 1e3, "ms"), ("ratios", 1.0, "ratios of times")):
        rows = [["gradient", *result["pairs"][0][what]]]
        for pair in result["pairs"]:
            rows.append([pair["of"], *(f"{factor * value:.2f}" for value in pair[what].values())])
        yield titled(
            f"bench.kernels.arrival: {result['numel']:,} elements, {result['threads']} threads,"
            f" {title}, median of {result['rounds']}",
            rows,
        )


PROGRAM = Program("bench.kernels.arrival", __doc__, OPTIONS, run, show)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
