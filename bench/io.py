"""Bandwidth of hetero's I/O engines beside fio and other ways from Python, on the same file.

usage: python -m bench.io [--path DIR] [--size 2GiB] [--block 1MiB] [--depth 16] [--rounds N]
                          [--peers fio,aiofiles,deepspeed|none] [--json]

Rates are GB/s (1e9 bytes) of "read", "write" and "mixed", which reads each extent and writes it
back, both counted. All contenders use O_DIRECT except aiofiles, which cannot and therefore drops
the pages it is to read and ends its writes with fsync. One after the other takes a turn; ratios are
taken within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bench.harness.peer_process import DEEPSPEED_INSTALL, PeerProcess
from bench.harness.program import Program, left_out, options, peer_options
from bench.harness.rounds import Rounds, Sample, run_rounds
from bench.harness.tables import Column, Table, number, ranged, shown
from bench.work.fio import INSTALL, SETTINGS, Fio, fio_version
from bench.work.transfers import PATTERNS, HeteroTransfers, Shape, measured_file
from offload.memory.sizes import format_bytes

PEERS = ("fio", "aiofiles", "deepspeed")
ENGINES = ("io_uring", "threads")
HETERO = "hetero io_uring"

DEEPSPEED_THREADS = {"deepspeed 1 thread": 1, "deepspeed 4 threads": 4}

Sampler = Callable[[str], Sample]  # of a pattern


OPTIONS = options(
    """
    --path    DIR   .     directory to measure in
    --size    SIZE  2GiB  of the file in each directory
    --block   SIZE  1MiB  of one transfer
    --depth   N>=0  16    blocks in flight
    --sample  SIZE  4GiB  least to move per turn, in whole passes over the file
    --rounds  N     5     after one of warm-up
    """
) + peer_options(PEERS)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All patterns of all contenders in the directory.

    Raises ValueError or OSError for input that cannot be measured.
    """
    path, peer_python = arguments.path, arguments.peer_python
    shape = Shape.of(arguments.size, arguments.block, arguments.depth, arguments.sample)
    print(f"{path}: writing {format_bytes(shape.size_bytes)}", file=sys.stderr, flush=True)
    notes = [
        "mixed: each extent is read and written back; both directions are counted",
        "CPU: user and system time of the contender's process; for fio, of its job",
    ]
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(measured_file(path, shape.size_bytes))
        samplers: dict[str, Sampler] = {}
        for kind in ENGINES:
            try:
                hetero = stack.enter_context(HeteroTransfers(kind, file, shape))
            except (OSError, ValueError) as refusal:
                if kind == "threads":
                    raise
                notes.append(f"hetero {kind}: not available: {refusal}")
                continue
            notes += hetero.notes
            samplers[f"hetero {kind}"] = hetero.sample
        for peer in arguments.peers:
            samplers |= _peer_samplers(peer, file, shape, peer_python, stack, notes)
        by_pattern = {}
        failed: dict[str, str] = {}
        for pattern in PATTERNS:
            turns = {name: partial(sample, pattern) for name, sample in samplers.items()}
            print(f"{pattern}:", file=sys.stderr, flush=True)
            by_pattern[pattern] = run_rounds(turns, arguments.rounds)
            failed |= by_pattern[pattern].failed
            for name in by_pattern[pattern].failed:
                del samplers[name]
        notes += left_out(failed)
    found: dict[str, Any] = summarize(by_pattern)
    if found["share_of_fio"]:
        shares = ", ".join(f"{p} {share:.3f}" for p, share in found["share_of_fio"].items())
        notes.insert(0, f"hetero io_uring / the best fio: {shares}")
    return {
        "path": path,
        **found,
        "block_bytes": shape.block_bytes,
        "depth": shape.depth,
        "size_bytes": shape.size_bytes,
        "request_bytes": shape.request_bytes,
        "requests_in_flight": shape.in_flight,
        "sample_bytes": {pattern: shape.moved_bytes(pattern) for pattern in PATTERNS},
        "rounds": arguments.rounds,
        "notes": notes,
    }


def _peer_samplers(
    peer: str,
    file: str,
    shape: Shape,
    peer_python: str,
    stack: contextlib.ExitStack,
    notes: list[str],
) -> dict[str, Sampler]:
    """The contenders that a name in --peers stands for; none, and a note, if not installed."""
    if peer == "fio":
        version = fio_version()
        if version is None:
            notes.append(f"fio: left out: it is not installed; {INSTALL}")
            return {}
        notes.append(f"fio: {version}, io_uring, O_DIRECT, with its defaults, tuned, and batched")
        return {name: Fio(file, shape, settings).sample for name, settings in SETTINGS.items()}
    made: dict[str, tuple[str, dict[str, Any], str]] = {
        name: (peer_python, {"threads": threads}, DEEPSPEED_INSTALL)
        for name, threads in DEEPSPEED_THREADS.items()
    }
    note = "deepspeed: libaio, O_DIRECT; a handle for each direction, each of --depth"
    if peer == "aiofiles":
        note = "aiofiles: buffered; drops the file's pages before reads, fsync after writes"
        made = {"aiofiles": (sys.executable, {}, "pip install aiofiles")}
    notes.append(note)
    samplers: dict[str, Sampler] = {}
    for name, (python, more, install) in made.items():
        setup = {"path": file, "shape": shape.to_dict(), **more}
        command = (python, "-m", "bench.peers.io", peer)
        process = stack.enter_context(PeerProcess(command, setup, install))
        samplers[name] = lambda pattern, process=process: process.sample(pattern=pattern)  # type: ignore[misc]
    return samplers


def summarize(by_pattern: Mapping[str, Rounds]) -> dict[str, Any]:
    """Rates and CPU by contender and pattern; the share of the rate of the best of fio's settings
    that "hetero io_uring" reaches, by pattern, where both are there."""
    contenders: dict[str, dict[str, Any]] = {}
    share: dict[str, float] = {}
    for pattern, rounds in by_pattern.items():
        for name, figures in rounds.figures().items():
            own = contenders.setdefault(name, {})
            own |= {f"{pattern}_{metric}": spread for metric, spread in figures.items()}
        settings = [name for name in SETTINGS if name in rounds.samples]
        if settings and HETERO in rounds.samples:
            best = max(settings, key=lambda name: rounds.median(name, "gbps"))
            rounds.compare(best, "gbps", "of_fio")
            share[pattern] = rounds.median(HETERO, "of_fio")
    return {"contenders": contenders, "share_of_fio": share}


def _title(result: Mapping[str, Any]) -> str:
    return (
        f"bench.io {result['path']}: {format_bytes(result['size_bytes'])}, blocks of"
        f" {format_bytes(result['block_bytes'])}, {result['depth']} in flight, median of"
        f" {result['rounds']} (least-most)"
    )


TABLE = Table(
    _title,
    "contenders",
    (
        *(Column(f"{pattern} GB/s", f"{pattern}_gbps", ranged()) for pattern in PATTERNS),
        *(Column(f"{p} CPU s/GB", f"{p}_cpu_s_per_gb", number(3)) for p in PATTERNS),
    ),
)
PROGRAM = Program("bench.io", __doc__, OPTIONS, run, shown(TABLE))
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
