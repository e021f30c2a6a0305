"""Memory and time of layers and losses in tiles, beside whole ones.

usage: python -m bench.tiling [--parts loss,tied,mlp,linear] [--tokens N] [--path DIR] [--json]

A turn is one forward and backward in a process of its own; contenders of a part take turns.
"CPU s" are those of all threads, which depend less on what else runs (OMP_WAIT_POLICY=passive,
so that waiting ones do not count). "grown" is how far the process grew in it: what autograd
holds, gradients of parameters included.
"loss" is the head's product and cross-entropy alone; "tied" an embedding and a head of one
weight, by hetero.tile_heads(); "mlp" GPT-2's feed-forward layer, by hetero.tile_sequence();
"linear" a layer of vocabulary x width whose state hetero keeps on NVMe in the least host_memory
that works, with an optimizer step, by hetero.TiledLinear.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from bench.harness.program import Program, options
from bench.harness.rounds import ContenderError, Sample, run_rounds
from bench.harness.tables import Column, Table, number, ranged, shown, size
from bench.harness.trial import run_trial
from bench.tiling.contenders import CONTENDERS, Sizes

TIMEOUT_S = 3600.0
KEYS = ("seconds", "cpu_seconds", "grown_bytes", "host_memory_bytes")
OPTIONS = options(
    """
    --parts        NAMES  loss,tied,mlp,linear  what is measured
    --tokens       N      4096                  tokens of a step
    --vocabulary   N      50257                 rows of the head
    --width        N      1024                  elements of a hidden state
    --tiles        N      16                    parts of the sequence, and of the linear layer
    --rounds       N      3                     turns of each contender, after one of warm-up
    --tile-tokens  N      -                     of the losses (default: hetero's)
    --dtype        NAME   bf16                  bf16 or fp32
    --threads      N      -                     of torch (default: its own number)
    --path         DIR    .                     a folder on NVMe
    """,
    parts=CONTENDERS,
    dtype=("bf16", "fp32"),
)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All figures. Raises ValueError for a part that cannot be measured."""
    given = {name: getattr(options, name) for name in Sizes.__dataclass_fields__}
    sizes = Sizes(**given)
    found: dict[str, Any] = {}
    for part in options.parts:
        turns: dict[str, Callable[[], Sample]] = {
            name: partial(_turn, part, name, sizes) for name in CONTENDERS[part]
        }
        rounds = run_rounds(turns, options.rounds)
        if rounds.failed:
            raise ValueError(f"{part}: {rounds.failed}")
        for metric in ("seconds", "cpu_seconds"):
            rounds.compare(next(iter(turns)), metric, f"{metric}_of_first")
        found |= {f"{part}: {name}": figures for name, figures in rounds.figures().items()}
    return {"contenders": found, **given}


def _turn(part: str, name: str, sizes: Sizes) -> Sample:
    given = json.dumps(asdict(sizes))
    command = [sys.executable, "-m", "bench.tiling.contenders", part, name, given]
    found = run_trial(command, TIMEOUT_S)
    if found["status"] != "ended":
        raise ContenderError(found["error"])
    return {key: value for key, value in found.items() if key in KEYS and value is not None}


TABLE = Table(
    lambda result: (
        f"bench.tiling: {result['tokens']:,} tokens, vocabulary {result['vocabulary']:,}, "
        f"width {result['width']:,}, {result['dtype']}; median (least-most)"
    ),
    "contenders",
    (
        Column("s", "seconds", ranged()),
        Column("/ first", "seconds_of_first", number()),
        Column("CPU s", "cpu_seconds", number()),
        Column("/ first", "cpu_seconds_of_first", number()),
        Column("grown", "grown_bytes", size),
        Column("host_memory", "host_memory_bytes", size),
    ),
)
PROGRAM = Program("bench.tiling", __doc__, OPTIONS, run, shown(TABLE))
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
