"""Steps whose saved tensors do not fit, beside plain PyTorch's ways to save memory.

usage: python -m bench.activations [--layers N] [--width N] [--seq-len N] [--batch-size N]
                                   [--activation-memory SIZE] [--host-memory SIZE] [--steps N]
                                   [--contenders LIST] [--path DIR] [--json]

Each contender trains the same GPT-2 in bf16 with AdamW, one after another, in a process of its
own. "Peak" is the most resident memory that the kernel has counted for the process; "beside" is
that less what it held before the first step, when all model state was there. Bytes are those of
activations on NVMe in a step; optimizer state, which hetero streams, is not among them. The losses
of contenders of hetero, and of those of PyTorch, must be the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.activations.contender import CONTENDERS, Setting
from bench.harness.machine import describe_machine
from bench.harness.peer_process import import_environment
from bench.harness.program import (
    add_json_argument,
    command_line,
    names,
    parse_size,
    print_header,
    program_parser,
    run_program,
)
from bench.work.gpt import Shape
from offload.memory.sizes import format_bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 when something about the input is wrong."""
    arguments = _parser().parse_args(argv)
    command = command_line("bench.activations", argv)
    return run_program("bench.activations", lambda: run(arguments, command), show, arguments.json)


def _parser() -> argparse.ArgumentParser:
    parser = program_parser("bench.activations", __doc__)
    for option, default in (
        ("--layers", 12),
        ("--width", 768),
        ("--heads", 12),
        ("--seq-len", 1024),
        ("--batch-size", 2),
        ("--steps", 2),
    ):
        parser.add_argument(
            option, type=int, default=default, metavar="N", help="default: %(default)s"
        )
    parser.add_argument("--activation-memory", default="256MiB", metavar="SIZE")
    parser.add_argument(
        "--host-memory",
        default="1GiB",
        metavar="SIZE",
        help="of hetero, activations included (default: %(default)s)",
    )
    parser.add_argument("--contenders", default=",".join(CONTENDERS), metavar="LIST")
    parser.add_argument("--path", metavar="DIR", help="on the NVMe disk (default: a new folder)")
    add_json_argument(parser)
    return parser


def run(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    """All figures. Raises ValueError for an unknown contender, or one that failed."""
    shape = Shape(
        arguments.layers,
        arguments.width,
        arguments.heads,
        arguments.seq_len,
        arguments.batch_size,
    )
    setting = Setting(
        shape,
        arguments.steps,
        parse_size("--activation-memory", arguments.activation_memory),
        parse_size("--host-memory", arguments.host_memory),
    )
    chosen = names(arguments.contenders)
    for name in chosen:
        if name not in CONTENDERS:
            raise ValueError(f"unknown contender {name!r}; known: {', '.join(CONTENDERS)}")
    results = {}
    with tempfile.TemporaryDirectory(dir=arguments.path, prefix="bench-activations-") as folder:
        for name in chosen:
            print(f"{name} ...", file=sys.stderr, flush=True)
            results[name] = _result(name, setting, folder)
    for kind in ("torch", "hetero"):
        losses = [tuple(r["losses"]) for name, r in results.items() if name.startswith(kind)]
        if len(set(losses)) > 1:
            raise ValueError(f"contenders of {kind} have different losses: {losses}")
    return {
        "machine": describe_machine(),
        "command": command,
        "shape": vars(shape),
        "activation_bytes": setting.activation_bytes,
        "host_bytes": setting.host_bytes,
        "results": results,
    }


def _result(name: str, setting: Setting, folder: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.activations.contender"]
    done = subprocess.run(
        [*command, name, setting.to_json(), folder],
        capture_output=True,
        text=True,
        env=os.environ | import_environment(),
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it printed nothing"]
        raise ValueError(f"{name} ended with {done.returncode}: {lines[-1]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def show(result: dict[str, Any], console: Console) -> None:
    """The table for people."""
    print_header(result, console)
    table = Table("", "step, s", "peak", "beside", "written", "read")
    for name, figures in result["results"].items():
        beside = figures["peak_bytes"] - figures["before_bytes"]
        sizes = figures["peak_bytes"], beside, figures["written_bytes"], figures["read_bytes"]
        table.add_row(CONTENDERS[name], f"{figures['step_s']:.2f}", *map(format_bytes, sizes))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
