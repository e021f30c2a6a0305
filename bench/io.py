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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.harness.machine import describe_machine
from bench.harness.peer_process import PeerProcess
from bench.harness.program import (
    add_json_argument,
    add_peer_arguments,
    chosen_peers,
    command_line,
    parse_size,
    print_header,
    program_parser,
    run_program,
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

DEEPSPEED_INSTALL = (
    "python -m venv VENV && VENV/bin/pip install torch deepspeed setuptools ninja (and the"
    " system's libaio-dev), then --peer-python VENV/bin/python"
)

Sampler = Callable[[str], Sample]  # of a pattern


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 when something about the input is wrong."""
    arguments = _parser().parse_args(argv)
    command = command_line("bench.io", argv)
    return run_program("bench.io", lambda: run(arguments, command), print_tables, arguments.json)


def _parser() -> argparse.ArgumentParser:
    parser = program_parser("bench.io", __doc__)
    parser.add_argument(
        "--path",
        action="append",
        required=True,
        metavar="DIR",
        help="directory to measure in; several are measured one after the other",
    )
    parser.add_argument(
        "--size", default="2GiB", help="of the file in each directory (default: %(default)s)"
    )
    parser.add_argument("--block", default="1MiB", help="of one transfer (default: %(default)s)")
    parser.add_argument(
        "--depth", type=int, default=16, help="blocks in flight (default: %(default)s)"
    )
    parser.add_argument(
        "--sample",
        default="4GiB",
        metavar="SIZE",
        help="least to move per turn, in whole passes over the file (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="after one of warm-up (default: %(default)s)"
    )
    add_peer_arguments(parser, PEERS, default=",".join(PEERS))
    add_json_argument(parser)
    return parser


def run(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    """The result of the first directory, and under "paths" those of all of them.

    Raises ValueError or OSError for input that cannot be measured.
    """
    shape = Shape.of(
        parse_size("--size", arguments.size),
        parse_size("--block", arguments.block),
        arguments.depth,
        parse_size("--sample", arguments.sample),
    )
    if arguments.rounds < 1:
        raise ValueError(f"--rounds must be 1 or more, got {arguments.rounds}")
    peers = chosen_peers(arguments.peers, PEERS)
    results = []
    for path in dict.fromkeys(arguments.path):
        print(f"{path}: writing {format_bytes(shape.size_bytes)}", file=sys.stderr, flush=True)
        results.append(
            measure_directory(path, shape, arguments.rounds, peers, arguments.peer_python)
        )
    return {
        **results[0],
        "paths": results,
        "machine": describe_machine(),
        "command": command,
    }


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
        notes += [f"{name}: left out: {reason}" for name, reason in failed.items()]
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


def print_tables(result: dict[str, Any], console: Console) -> None:
    """One table per directory: rates with their ranges, CPU, and what was left out."""
    print_header(result, console)
    for directory in result["paths"]:
        table = Table(
            title=f"bench.io {directory['path']}: {format_bytes(directory['size_bytes'])},"
            f" blocks of {format_bytes(directory['block_bytes'])}, {directory['depth']} in flight,"
            f" median of {directory['rounds']} (least-most)",
            title_justify="left",
        )
        table.add_column("contender", no_wrap=True)
        for pattern in PATTERNS:
            table.add_column(f"{pattern} GB/s", justify="right", no_wrap=True)
        for pattern in PATTERNS:
            table.add_column(f"{pattern} CPU s/GB", justify="right", no_wrap=True)
        for name in directory["cpu_s_per_gb"]:
            if name not in BEST_OF:
                table.add_row(name, *_rates(directory, name), *_cpu(directory, name))
        console.print(table)
        share = directory["share_of_fio"]
        if any(share.values()):
            shares = ", ".join(f"{p} {s:.3f}" for p, s in share.items() if s is not None)
            console.print(f"hetero io_uring / the best fio: {shares}", highlight=False)
        for note in directory["notes"]:
            console.print(note, markup=False, highlight=False)


def _rates(directory: Mapping[str, Any], name: str) -> list[str]:
    cells = []
    for pattern in PATTERNS:
        spread = directory["ranges"][pattern].get(name)
        cells.append(
            f"{spread['median']:.2f} ({spread['min']:.2f}-{spread['max']:.2f})" if spread else ""
        )
    return cells


def _cpu(directory: Mapping[str, Any], name: str) -> list[str]:
    cpu = directory["cpu_s_per_gb"][name]
    return [f"{cpu[pattern]:.3f}" if pattern in cpu else "" for pattern in PATTERNS]


if __name__ == "__main__":
    sys.exit(main())
