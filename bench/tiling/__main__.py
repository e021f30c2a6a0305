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
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from bench.harness.peer_process import import_environment
from bench.harness.program import FOLDER, Option, Program, one_of, ranged, some_of, titled, whole
from bench.harness.rounds import ContenderError, Sample, run_rounds
from bench.tiling.contenders import CONTENDERS, Sizes, arguments
from offload.memory.sizes import format_bytes

_METRICS = ("seconds", "cpu_seconds", "grown_bytes", "host_memory_bytes")


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
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for part in options.parts:
        turns: dict[str, Callable[[], Sample]] = {
            name: partial(_turn, part, name, sizes) for name in CONTENDERS[part]
        }
        rounds = run_rounds(turns, options.rounds)
        if rounds.failed:
            raise ValueError(f"{part}: {rounds.failed}")
        found[part] = {
            name: {
                metric: rounds.spread(name, metric)
                for metric in _METRICS
                if metric in rounds.samples[name][0]
            }
            | {"seconds_of_first": rounds.ratio(name, next(iter(turns)), "seconds")}
            | {"cpu_of_first": rounds.ratio(name, next(iter(turns)), "cpu_seconds")}
            for name in turns
        }
    return {"parts": found, **given}


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


def show(result: dict[str, Any]) -> Iterator[str]:
    """A table of a line for each contender."""
    rows = [["", "s", "/ first", "CPU s", "/ first", "grown", "host_memory"]]
    for part, contenders in result["parts"].items():
        for name, figures in contenders.items():
            host = figures.get("host_memory_bytes")
            rows.append(
                [
                    f"{part}: {name}",
                    ranged(figures["seconds"]),
                    f"{figures['seconds_of_first']:.2f}",
                    f"{figures['cpu_seconds']['median']:.2f}",
                    f"{figures['cpu_of_first']:.2f}",
                    format_bytes(int(figures["grown_bytes"]["median"])),
                    "" if host is None else format_bytes(int(host["median"])),
                ]
            )
    yield titled(
        f"bench.tiling: {result['tokens']:,} tokens, vocabulary {result['vocabulary']:,}, "
        f"width {result['width']:,}, {result['dtype']}; median (least-most)",
        rows,
    )


PROGRAM = Program("bench.tiling", __doc__, OPTIONS, run, show)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
