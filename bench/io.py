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
from typing import Any

from bench.harness.peer_process import DEEPSPEED_INSTALL, PeerProcess
from bench.harness.program import (
    SIZE,
    Option,
    Program,
    left_out,
    peer_options,
    ranged,
    titled,
    whole,
)
from bench.harness.rounds import Rounds, Sample, run_rounds
from bench.work.fio import INSTALL, SETTINGS, Fio, fio_version
from bench.work.transfers import PATTERNS, HeteroTransfers, Shape, measured_file
from offload.memory.sizes import format_bytes

PEERS = ("fio", "aiofiles", "deepspeed")
ENGINES = ("io_uring", "threads")

DEEPSPEED_THREADS = {"deepspeed 1 thread": 1, "deepspeed 4 threads": 4}

# What is measured with several settings counts with the one that is best for the pattern.
BEST_OF = {
    "fio": tuple(SETTINGS),
    "deepspeed": tuple(DEEPSPEED_THREADS),
}

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
            turns = {name: _bound(sample, pattern) for name, sample in samplers.items()}
            print(f"{pattern}:", file=sys.stderr, flush=True)
            by_pattern[pattern] = run_rounds(turns, rounds)
            failed |= by_pattern[pattern].failed
            for name in by_pattern[pattern].failed:
                del samplers[name]
        notes += left_out(failed)
    return {
        "path": path,
        **summarize(by_pattern),
        "block_bytes": shape.block_bytes,
        "depth": shape.depth,
        "size_bytes": shape.size_bytes,
        "request_bytes": shape.request_bytes,
        "requests_in_flight": shape.in_flight,
        "sample_bytes": {pattern: shape.moved_bytes(pattern) for pattern in PATTERNS},
        "rounds": rounds,
        "notes": notes,
    }


def _bound(sample: Sampler, pattern: str) -> Callable[[], Sample]:
    return lambda: sample(pattern)


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
        return {"aiofiles": lambda pattern: process.sample(pattern=pattern)}
    notes.append("deepspeed: libaio, O_DIRECT; a handle for each direction, each of --depth")
    samplers = {}
    for name, threads in DEEPSPEED_THREADS.items():
        process = stack.enter_context(
            PeerProcess(
                (peer_python, "-m", "bench.peers.io_deepspeed"),
                setup | {"threads": threads},
                DEEPSPEED_INSTALL,
            )
        )
        samplers[name] = _process_sampler(process)
    return samplers


def _process_sampler(process: PeerProcess) -> Sampler:
    return lambda pattern: process.sample(pattern=pattern)


def summarize(by_pattern: Mapping[str, Rounds]) -> dict[str, Any]:
    """Medians per pattern and contender, their ranges, and the share of fio's rate that
    "hetero io_uring" reaches (null where one of them is missing)."""
    rates: dict[str, dict[str, float]] = {}
    ranges: dict[str, dict[str, dict[str, float]]] = {}
    cpu: dict[str, dict[str, float]] = {}
    share: dict[str, float | None] = {}
    for pattern, rounds in by_pattern.items():
        ranges[pattern] = {name: rounds.spread(name, "gbps") for name in rounds.samples}
        rates[pattern] = {name: ranges[pattern][name]["median"] for name in rounds.samples}
        best = {
            group: max(present, key=rates[pattern].__getitem__)
            for group, members in BEST_OF.items()
            if (present := [name for name in members if name in rounds.samples])
        }
        for group, name in best.items():
            rates[pattern][group] = rates[pattern][name]
        for name in rates[pattern]:
            measured = best.get(name, name)
            cpu.setdefault(name, {})[pattern] = rounds.median(measured, "cpu_s_per_gb")
        both = "fio" in best and "hetero io_uring" in rounds.samples
        share[pattern] = (
            rounds.ratio("hetero io_uring", best["fio"], "gbps") if both else None
        )  # fmt: skip
    return {**rates, "share_of_fio": share, "cpu_s_per_gb": cpu, "ranges": ranges}


def show(result: dict[str, Any]) -> Iterator[str]:
    """One table per directory: rates with their ranges, CPU, and what was left out."""
    for directory in result["paths"]:
        ranges, cpu = directory["ranges"], directory["cpu_s_per_gb"]
        units = ("GB/s", "CPU s/GB")
        rows = [["contender", *(f"{pattern} {unit}" for unit in units for pattern in PATTERNS)]]
        for name in cpu:
            if name not in BEST_OF:
                rates = (ranges[p].get(name) for p in PATTERNS)
                seconds = (f"{cpu[name][p]:.3f}" if p in cpu[name] else "" for p in PATTERNS)
                rows.append([name, *(ranged(r) if r else "" for r in rates), *seconds])
        yield titled(
            f"bench.io {directory['path']}: {format_bytes(directory['size_bytes'])},"
            f" blocks of {format_bytes(directory['block_bytes'])}, {directory['depth']} in flight,"
            f" median of {directory['rounds']} (least-most)",
            rows,
        )
        share = directory["share_of_fio"]
        if any(share.values()):
            shares = ", ".join(f"{p} {s:.3f}" for p, s in share.items() if s is not None)
            yield f"hetero io_uring / the best fio: {shares}"
        yield from directory["notes"]


PROGRAM = Program("bench.io", __doc__, OPTIONS, run, show, _add_path)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
