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
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.harness.program import SIZE, Option, Program, list_of, ranged, titled, whole
from bench.harness.rounds import Sample, run_rounds
from offload import _native
from offload._native import Arena
from offload.memory.sizes import format_bytes

TURN_BYTES = 256 << 20


OPTIONS = (
    Option("--sizes", "256KiB,256MiB", "of the buffers", list_of(SIZE)),
    Option("--rounds", "7", "after one of warm-up", whole()),
)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    buffers = []
    for nbytes in arguments.sizes:
        rounds = run_rounds(_contenders(nbytes), arguments.rounds)
        gbps = {name: rounds.spread(name, "gbps") for name in rounds.samples}
        buffers.append({"nbytes": nbytes, "gbps": gbps})
    return {"buffers": buffers, "rounds": arguments.rounds}


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


def show(result: dict[str, Any]) -> Iterator[str]:
    """GB/s of each contender at each size."""
    buffers = result["buffers"]
    rows = [["contender", *(format_bytes(buffer["nbytes"]) for buffer in buffers)]]
    for name in buffers[0]["gbps"]:
        rows.append([name, *(ranged(buffer["gbps"][name]) for buffer in buffers)])
    yield titled(
        f"bench.kernels.checksum: GB/s, one thread, median of {result['rounds']} (least-most)", rows
    )


PROGRAM = Program("bench.kernels.checksum", __doc__, OPTIONS, run, show)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
