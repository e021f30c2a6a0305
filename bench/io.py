"""Bandwidth of hetero's I/O engines beside fio and other ways from Python, on the same file.

usage: python -m bench.io --path DIR [--path DIR2 ...] [--size 2GiB] [--block 1MiB] [--depth 16]
                          [--rounds N] [--peers fio,aiofiles,deepspeed|none] [--json]

Rates are GB/s (1e9 bytes) of "read", "write" and "mixed", which reads each extent and writes it
back, both counted. All contenders use O_DIRECT except aiofiles, which cannot and therefore drops
the pages it is to read and ends its writes with fsync. One after the other takes a turn; ratios are
taken within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from bench.harness.peer_process import DEEPSPEED_INSTALL, PeerProcess
from bench.harness.program import SIZE, Option, Program, left_out, peer_options, whole
from bench.harness.rounds import Rounds, Sample, run_rounds
from bench.harness.tables import Column, number, of_figures, ranged
from bench.work.fio import INSTALL, SETTINGS, Fio, fio_version
from bench.work.transfers import PATTERNS, HeteroTransfers, Shape, measured_file
from offload.memory.sizes import format_bytes

PEERS = ("fio", "aiofiles", "deepspeed")
ENGINES = ("io_uring", "threads")
HETERO = "hetero io_uring"

DEEPSPEED_THREADS = {"deepspeed 1 thread": 1, "deepspeed 4 threads": 4}

Sampler = Callable[[str], Sample]  # of a pattern


OPTIONS = (
    Option("--size", "2GiB", "of the file in each directory", SIZE),
    Option("--block", "1MiB", "of one transfer", SIZE),
    Option("--depth", "16", "blocks in flight", whole(0)),
    Option("--sample", "4GiB", "least to move per turn, in whole passes over the file", SIZE),
    Option("--rounds", "5", "after one of warm-up", whole()),
    *peer_options(PEERS),
)


def _add_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--path",
        action="append",
        required=True,
        metavar="DIR",
        help="directory to measure in; several are measured one after the other",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The result of the first directory, and under "paths" those of all of them.

    Raises ValueError or OSError for input that cannot be measured.
    """
    shape = Shape.of(arguments.size, arguments.block, arguments.depth, arguments.sample)
    results = []
    for path in dict.fromkeys(arguments.path):
        print(f"{path}: writing {format_bytes(shape.size_bytes)}", file=sys.stderr, flush=True)
        results.append(
            measure_directory(path, shape, arguments.rounds, arguments.peers, arguments.peer_python)
        )
    return {**results[0], "paths": results}


def measure_directory(
    path: str, shape: Shape, rounds: int, peers: Sequence[str], peer_python: str
) -> dict[str, Any]:
    """All patterns of all contenders in one directory, as the JSON reports them."""
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
        for peer in peers:
            samplers |= _peer_samplers(peer, file, shape, peer_python, stack, notes)
        by_pattern = {}
        failed: dict[str, str] = {}
        for pattern in PATTERNS:
            turns = {name: partial(sample, pattern) for name, sample in samplers.items()}
            print(f"{pattern}:", file=sys.stderr, flush=True)
            by_pattern[pattern] = run_rounds(turns, rounds)
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
        "rounds": rounds,
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
    setup: dict[str, Any] = {"path": file, "shape": shape.to_dict()}
    if peer == "aiofiles":
        notes.append("aiofiles: buffered; drops the file's pages before reads, fsync after writes")
        command = (sys.executable, "-m", "bench.peers.io_aiofiles")
        process = stack.enter_context(PeerProcess(command, setup, "pip install aiofiles"))
        return {"aiofiles": partial(_peer_sample, process)}
    notes.append("deepspeed: libaio, O_DIRECT; a handle for each direction, each of --depth")
    samplers: dict[str, Sampler] = {}
    for name, threads in DEEPSPEED_THREADS.items():
        process = stack.enter_context(
            PeerProcess(
                (peer_python, "-m", "bench.peers.io_deepspeed"),
                setup | {"threads": threads},
                DEEPSPEED_INSTALL,
            )
        )
        samplers[name] = partial(_peer_sample, process)
    return samplers


def _peer_sample(process: PeerProcess, pattern: str) -> Sample:
    return process.sample(pattern=pattern)


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


COLUMNS = (
    *(Column(f"{pattern} GB/s", f"{pattern}_gbps", ranged()) for pattern in PATTERNS),
    *(Column(f"{p} CPU s/GB", f"{p}_cpu_s_per_gb", number(3)) for p in PATTERNS),
)


def show(result: dict[str, Any]) -> Iterator[str]:
    """One table per directory: rates with their ranges, CPU, and what was left out."""
    for found in result["paths"]:
        title = (
            f"bench.io {found['path']}: {format_bytes(found['size_bytes'])}, blocks of"
            f" {format_bytes(found['block_bytes'])}, {found['depth']} in flight, median of"
            f" {found['rounds']} (least-most)"
        )
        yield of_figures(title, found["contenders"], COLUMNS)
        yield from found["notes"]


PROGRAM = Program("bench.io", __doc__, OPTIONS, run, show, _add_path)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
