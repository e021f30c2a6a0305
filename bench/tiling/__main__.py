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
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.harness.peer_process import import_environment
from bench.harness.program import FOLDER, Option, Program, one_of, some_of, whole
from bench.harness.rounds import ContenderError, Sample, run_rounds
from bench.harness.tables import Column, Table, number, ranged, shown, size
from bench.tiling.contenders import CONTENDERS, Sizes, arguments

OPTIONS = (
    Option("--parts", ",".join(CONTENDERS), "what is measured", some_of(CONTENDERS)),
    Option("--tokens", str(Sizes.tokens), "tokens of a step", whole()),
    Option("--vocabulary", str(Sizes.vocabulary), "rows of the head", whole()),
    Option("--width", str(Sizes.width), "elements of a hidden state", whole()),
    Option("--tiles", str(Sizes.tiles), "parts of the sequence, and of the linear layer", whole()),
    Option("--rounds", "3", "turns of each contender, after one of warm-up", whole()),
    Option("--tile-tokens", None, "of the losses (default: hetero's)", whole()),
    Option("--dtype", Sizes.dtype, "bf16 or fp32", one_of(("bf16", "fp32"))),
    Option("--threads", None, "of torch (default: its own number)", whole()),
    Option("--path", ".", "a folder on NVMe", FOLDER),
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


def _turn(part: str, name: str, sizes: Sizes) -> dict[str, float]:
    made = subprocess.run(
        [sys.executable, *arguments(part, name, sizes)],
        env=os.environ | import_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        last = made.stderr.strip().splitlines() or [f"exit code {made.returncode}"]
        raise ContenderError(last[-1])
    sample: dict[str, float] = json.loads(made.stdout)
    return sample


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
