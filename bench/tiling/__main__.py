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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.harness.machine import describe_machine
from bench.harness.peer_process import import_environment
from bench.harness.program import (
    add_json_argument,
    command_line,
    names,
    print_header,
    program_parser,
    run_program,
)
from bench.harness.rounds import ContenderError, Sample, run_rounds
from bench.tiling.contenders import CONTENDERS, Sizes, arguments
from offload.memory.sizes import format_bytes

_METRICS = ("seconds", "cpu_seconds", "grown_bytes", "host_memory_bytes")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 when something about the input is wrong."""
    parser = program_parser("bench.tiling", __doc__)
    parser.add_argument("--parts", default=",".join(CONTENDERS), help="(default: %(default)s)")
    for name, default, text in (
        ("tokens", Sizes.tokens, "tokens of a step"),
        ("vocabulary", Sizes.vocabulary, "rows of the head"),
        ("width", Sizes.width, "elements of a hidden state"),
        ("tiles", Sizes.tiles, "parts of the sequence, and of the linear layer"),
        ("rounds", 3, "turns of each contender, after one of warm-up"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{text} (default: %(default)s)"
        )
    parser.add_argument("--tile-tokens", type=int, help="of the losses (default: hetero's)")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default=Sizes.dtype)
    parser.add_argument("--threads", type=int, help="of torch (default: its own number)")
    parser.add_argument("--path", default=".", help="a folder on NVMe (default: this one)")
    add_json_argument(parser)
    options = parser.parse_args(argv)
    command = command_line("bench.tiling", argv)
    return run_program("bench.tiling", lambda: run(options, command), show, options.json)


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """All figures. Raises ValueError for input that cannot be measured."""
    parts = names(options.parts)
    for part in parts:
        if part not in CONTENDERS:
            raise ValueError(f"unknown part {part!r} in --parts; known: {', '.join(CONTENDERS)}")
    for name in ("tokens", "vocabulary", "width", "tiles", "rounds", "tile_tokens", "threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be 1 or more, got {value}")
    given = {name: getattr(options, name) for name in Sizes.__dataclass_fields__}
    sizes = Sizes(**given)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for part in parts:
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
    return {"parts": found, **given, "machine": describe_machine(), "command": command}


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


def show(result: dict[str, Any], console: Console) -> None:
    """A table of a line for each contender."""
    print_header(result, console)
    table = Table(
        title=f"bench.tiling: {result['tokens']:,} tokens, vocabulary {result['vocabulary']:,}, "
        f"width {result['width']:,}, {result['dtype']}; median (least, most)",
        title_justify="left",
    )
    for title in ("part", "", "s", "/ first", "CPU s", "/ first", "grown", "host_memory"):
        table.add_column(title, justify="left" if title in ("part", "") else "right", no_wrap=True)
    for part, contenders in result["parts"].items():
        for name, figures in contenders.items():
            seconds, host = figures["seconds"], figures.get("host_memory_bytes")
            table.add_row(
                part,
                name,
                f"{seconds['median']:.2f} ({seconds['min']:.2f}, {seconds['max']:.2f})",
                f"{figures['seconds_of_first']:.2f}",
                f"{figures['cpu_seconds']['median']:.2f}",
                f"{figures['cpu_of_first']:.2f}",
                format_bytes(int(figures["grown_bytes"]["median"])),
                "" if host is None else format_bytes(int(host["median"])),
            )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
