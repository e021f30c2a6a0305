"""CRC-32C by every implementation that this machine has, beside memcpy and zlib's CRC-32.

usage: python -m bench.kernels.checksum [--sizes 256KiB,256MiB] [--rounds N] [--json]

One contender after the other takes a turn, on one thread; a turn goes through the buffer as often
as makes 256 MiB, once at least. GB/s counts bytes of the buffer, for memcpy those copied. The
default sizes are one that the core's own cache holds, copy included, and one that no cache does.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

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
from bench.harness.rounds import Sample, run_rounds
from offload import _native
from offload._native import Arena
from offload.memory.sizes import format_bytes

TURN_BYTES = 256 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 when something about the input is wrong."""
    parser = program_parser("bench.kernels.checksum", __doc__)
    parser.add_argument(
        "--sizes", default="256KiB,256MiB", help="of the buffers (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="(default: %(default)s)")
    add_json_argument(parser)
    arguments = parser.parse_args(argv)
    command = command_line("bench.kernels.checksum", argv)
    return run_program(
        "bench.kernels.checksum", lambda: run(arguments, command), show, arguments.json
    )


def run(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    """All figures. Raises ValueError for input that cannot be measured."""
    if arguments.rounds < 1:
        raise ValueError(f"--rounds must be 1 or more, got {arguments.rounds}")
    sizes = [parse_size("--sizes", text) for text in names(arguments.sizes)]
    if not sizes:
        raise ValueError("--sizes names no size; write e.g. 256KiB,256MiB")
    buffers = []
    for nbytes in sizes:
        rounds = run_rounds(_contenders(nbytes), arguments.rounds)
        gbps = {name: rounds.spread(name, "gbps") for name in rounds.samples}
        buffers.append({"nbytes": nbytes, "gbps": gbps})
    return {
        "buffers": buffers,
        "rounds": arguments.rounds,
        "machine": describe_machine(),
        "command": command,
    }


def _contenders(nbytes: int) -> dict[str, Callable[[], Sample]]:
    source, target = Arena(nbytes), Arena(nbytes)
    for arena in (source, target):  # so that every page is there
        torch.from_dlpack(arena.export(0, nbytes)).fill_(1)  # type: ignore[attr-defined]
    view = (ctypes.c_char * nbytes).from_address(source.address)

    def by(implementation: str) -> Callable[[], object]:
        return lambda: _native.crc32c(source.address, nbytes, 0, implementation)

    bodies = {f"crc32c {name}": by(name) for name in _native.crc32c_implementations()}
    bodies["memcpy"] = lambda: ctypes.memmove(target.address, source.address, nbytes)
    bodies["zlib.crc32"] = lambda: zlib.crc32(view)
    return {name: _turn(body, nbytes) for name, body in bodies.items()}


def _turn(body: Callable[[], object], nbytes: int) -> Callable[[], Sample]:
    passes = -(-TURN_BYTES // nbytes)

    def sample() -> Sample:
        begin_s = time.perf_counter()
        for _ in range(passes):
            body()
        return {"gbps": passes * nbytes / (time.perf_counter() - begin_s) / 1e9}

    return sample


def show(result: dict[str, Any], console: Console) -> None:
    """GB/s of each contender at each size."""
    print_header(result, console)
    table = Table(
        title=f"bench.kernels.checksum: GB/s, one thread, median of {result['rounds']}"
        " (least-most)",
        title_justify="left",
    )
    table.add_column("contender", no_wrap=True)
    for buffer in result["buffers"]:
        table.add_column(format_bytes(buffer["nbytes"]), justify="right", no_wrap=True)
    for name in result["buffers"][0]["gbps"]:
        spreads = [buffer["gbps"][name] for buffer in result["buffers"]]
        cells = [f"{s['median']:.2f} ({s['min']:.2f}-{s['max']:.2f})" for s in spreads]
        table.add_row(name, *cells)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
