"""Native kernels alone: gradients that arrive, checksums, collectives of ranks.

usage: python -m bench.kernels [--of arrival|checksum|collectives] [--rounds N] [--json]

Contenders take turns; ratios are taken within a round.

arrival      a gradient's arrival where it is kept, with the sum of its squares on the way. "copy"
             and "add" are torch's copy_() and add_(); "then sum" adds the pass over what is kept
             that a norm would need; "and sum" is hetero's, which does both in one pass with the
             same bits. Run it with OMP_WAIT_POLICY=passive, or torch's threads disturb hetero's.
checksum     CRC-32C by every implementation that this machine has, beside memcpy and zlib's CRC-32,
             on one thread. GB/s counts bytes of the buffer. The default sizes are one that the
             core's own cache holds, copy included, and one that no cache does.
collectives  those of gloo that gathers and means of gradients could be made of, over loopback.
             "hetero's gather" and "hetero's mean" are what training uses: reads of each other's
             memory, and an own sum in fp32; "by gloo" is what it uses where ranks cannot read it.
             Bytes are those that the loopback device counted, of all ranks together, over the
             tensor's. Each rank computes with one thread.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from bench.harness.program import Program, options
from bench.harness.rounds import Sample, run_rounds
from bench.harness.tables import Column, number, of_figures, ranged
from bench.kernels.collectives import measure_collectives
from bench.work.updates import Updates
from offload import _native
from offload._native import Arena
from offload.memory.sizes import format_bytes

if TYPE_CHECKING:
    from offload._native import DtypeName

# What backward gives, and what is kept.
PAIRS: tuple[tuple[DtypeName, DtypeName], ...] = (
    ("bf16", "bf16"),
    ("fp16", "fp16"),
    ("fp32", "fp32"),
    ("bf16", "fp32"),
)
TURN_BYTES = 256 << 20  # of a checksum's turn, in whole passes over the buffer

Figures = dict[str, dict[str, Any]]


def measure_arrival(arguments: argparse.Namespace) -> dict[str, Figures]:
    """By dtypes of what arrives and of what is kept."""
    updates, found = Updates(arguments.numel, arguments.repeats), {}
    for source_dtype, dtype in PAIRS:
        turns = {v.name: v.sample for v in updates.writes(source_dtype, dtype)}
        rounds = run_rounds(turns, arguments.rounds)
        for name in turns:
            rounds.derive(name, partial(_of_arrival, arguments.numel, name))
        found[f"{source_dtype} to {dtype}"] = rounds.figures()
    return found


def _of_arrival(numel: int, name: str, made: Mapping[str, Sample]) -> Sample:
    """Seconds, and over those of torch's call alone, and followed by a sum."""
    verb, rate = name.replace(",", " ").split()[0], made[name]["params_per_s"]
    return {
        "s": numel / rate,
        "of_plain": made[verb]["params_per_s"] / rate,
        "of_both": made[f"{verb}, then sum"]["params_per_s"] / rate,
    }


def measure_checksum(arguments: argparse.Namespace) -> dict[str, Figures]:
    """By sizes of buffers."""
    return {
        format_bytes(nbytes): run_rounds(_checksums(nbytes), arguments.rounds).figures()
        for nbytes in arguments.sizes
    }


def _checksums(nbytes: int) -> dict[str, Callable[[], Sample]]:
    source, target = Arena(nbytes), Arena(nbytes)
    for arena in (source, target):  # so that every page is there
        torch.from_dlpack(arena.export(0, nbytes)).fill_(1)  # type: ignore[attr-defined]
    view = (ctypes.c_char * nbytes).from_address(source.address)
    bodies: dict[str, Callable[[], object]] = {
        "crc32c": partial(_native.crc32c, source.address, nbytes),
        "crc32c by tables": partial(_by_tables, source.address, nbytes),
    }
    bodies["memcpy"] = lambda: ctypes.memmove(target.address, source.address, nbytes)
    bodies["zlib.crc32"] = lambda: zlib.crc32(view)
    return {name: partial(_passes, body, nbytes) for name, body in bodies.items()}


def _by_tables(address: int, nbytes: int) -> None:
    """The checksum without the processor's instruction for it."""
    before = _native.isa()
    _native.set_isa("scalar")
    _native.crc32c(address, nbytes)
    _native.set_isa(before)


def _passes(body: Callable[[], object], nbytes: int) -> Sample:
    passes = -(-TURN_BYTES // nbytes)
    begin_s = time.perf_counter()
    for _ in range(passes):
        body()
    return {"gbps": passes * nbytes / (time.perf_counter() - begin_s) / 1e9}


MEASURES = {
    "arrival": measure_arrival,
    "checksum": measure_checksum,
    "collectives": measure_collectives,
}
OPTIONS = options(
    """
    --of       NAME   arrival        what is measured
    --rounds   N      5              turns of each; after one of warm-up but for collectives
    --repeats  N      3              timed calls per turn, of arrival and collectives
    --numel    COUNT  16Mi           elements, of arrival
    --threads  N      -              of hetero and torch in arrival (default: usable CPUs)
    --sizes    SIZES  256KiB,256MiB  of the buffers of checksum
    --ranks    N>=2   2              processes of collectives
    --size     SIZE   64MiB          of the whole tensor of collectives
    """,
    of=MEASURES,
)
COLUMNS = (
    Column("ms", "s", number(2, 1e3)),
    Column("/ torch's call", "of_plain", number()),
    Column("/ call, then sum", "of_both", number()),
    Column("GB/s", "gbps", ranged()),
    Column("bytes over loopback / tensor", "bytes", number()),
)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of each group of contenders."""
    threads = arguments.threads or _native.usable_cpus()
    _native.set_threads(threads)
    torch.set_num_threads(threads)
    found = MEASURES[arguments.of](arguments)
    given = {name: getattr(arguments, name) for name in ("of", "rounds", "repeats", "numel")}
    return {**given, "groups": found, "threads": threads, "isa": _native.isa()}


def show(result: dict[str, Any]) -> Iterator[str]:
    """A table for each group."""
    for group, rows in result["groups"].items():
        title = f"bench.kernels, {result['of']}: {group}, median of {result['rounds']} rounds"
        yield of_figures(title, rows, COLUMNS)


PROGRAM = Program("bench.kernels", __doc__, OPTIONS, run, show)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
