"""Bandwidth of hetero's I/O engine beside fio, in files of one directory.

usage: python -m bench.io [--path DIR] [--size 2GiB] [--rounds N] [--peers fio|none] [--json]

Rates are GB/s (1e9 bytes) of "read", "write" and "mixed", half of which reads. hetero moves 64 MiB
at a time, four at once, in blocks of 1 MiB, of which 32 are in flight. fio has an O_DIRECT job of
io_uring with as many: with its defaults, with registered buffers in huge pages ("tuned"), and with
fewer system calls ("batched"). All take turns; ratios are taken within a round, and to the best of
fio's settings. CPU seconds are of the process, its kernel's workers included; of fio of its job.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness.program import Program, add_options, byte_size, left_out, names_of, tell, whole
from bench.harness.rounds import ContenderError, MissingError, Sample, run_rounds
from bench.harness.tables import number, of_figures, ranged, size
from offload.profile.measure import READ_SHARES, open_disk

HETERO = "hetero"
# The best settings known of fio 3.33 and later, beside what is part of the measurement: no clock
# per block, buffers filled only once, and, what counts most, buffers in huge pages (through glibc,
# since fio's own options need reserved huge pages).
TUNED = ("--fixedbufs=1", "--registerfiles=1", "--gtod_reduce=1", "--scramble_buffers=0",
         "--thread=1")  # fmt: skip
BATCHED = ("--iodepth_batch_submit=8", "--iodepth_batch_complete_min=1",
           "--iodepth_batch_complete_max=16")  # fmt: skip
SETTINGS = {"fio default": (), "fio tuned": TUNED, "fio batched": TUNED + BATCHED}
TIMEOUT_S = 900.0
DISK_WINDOW_S = 1.0  # of one measurement
TRANSFER_BYTES = 64 << 20  # so that as many blocks as fio has are in flight all the time


def options(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        ("--path", str, ".", "directory to measure in"),
        ("--size", byte_size, "2GiB", "of each file, at most"),
        ("--rounds", whole(), "5", "after one of warm-up"),
        ("--peers", names_of(("fio",)), "fio", "fio, or none"),
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All patterns of all contenders. Raises ValueError or OSError for what cannot be measured."""
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    shares: dict[str, float] = {}
    with ExitStack() as stack:
        disk = stack.enter_context(
            disk_alone(arguments.path, arguments.size, transfer_bytes=TRANSFER_BYTES)
        )
        temporary = tempfile.TemporaryDirectory(prefix="hetero-bench-", dir=arguments.path)
        folder = stack.enter_context(temporary)
        for pattern, share in READ_SHARES.items():
            turns: dict[str, Callable[[], Sample]] = {HETERO: partial(_sample, disk, share)}
            for name, settings in SETTINGS.items() if arguments.peers else ():
                command = fio_command(f"{folder}/file", arguments.size, pattern, settings)
                turns[name] = partial(run_fio, command, bool(settings))
            rounds = run_rounds(turns, arguments.rounds)
            failed |= rounds.failed
            peers = [name for name in rounds.samples if name != HETERO]
            if peers:
                best = max(peers, key=lambda name: rounds.median(name, "gbps"))
                rounds.compare(best, "gbps", "of_fio")
                shares[pattern] = rounds.median(HETERO, "of_fio")
            for name, figures in rounds.figures().items():
                own = {f"{pattern}_{metric}": spread for metric, spread in figures.items()}
                found[name] = found.get(name, {}) | own
    notes = left_out(failed)
    if shares:
        words = ", ".join(f"{pattern} {share:.3f}" for pattern, share in shares.items())
        notes.insert(0, f"hetero / the best fio: {words}")
    given = {name: getattr(arguments, name) for name in ("path", "size", "rounds")}
    return {**given, "contenders": found, "share_of_fio": shares, "notes": notes}


@contextmanager
def disk_alone(path: str, area_bytes: int, **options: int) -> Iterator[Callable[[float], Sample]]:
    """Samples {"gbps"} of transfers in a file of `area_bytes`, of which a share (0 to 1) reads,
    while nothing else goes on.

    `options` are further ones of open_disk(). Raises ValueError for what is no directory.
    """
    if not Path(path).is_dir():
        raise ValueError(f"--path {path} is not a directory; make it first")
    options["area_bytes"] = area_bytes
    with open_disk([path], tell, window_s=DISK_WINDOW_S, **options) as rate:
        yield lambda read_share: {"gbps": rate(read_share) / 1e9}


def _sample(disk: Callable[[float], Sample], read_share: float) -> Sample:
    """The rate, and CPU seconds of this process for each GB."""
    begin_s, cpu_s = time.perf_counter(), _cpu_s()
    gbps = disk(read_share)["gbps"]
    moved_gb = gbps * (time.perf_counter() - begin_s)
    return {"gbps": gbps, "cpu_s_per_gb": (_cpu_s() - cpu_s) / moved_gb}


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def fio_command(path: str, nbytes: int, pattern: str, settings: tuple[str, ...]) -> list[str]:
    """A job for as long as hetero's turn, in a file that fio writes first."""
    kind = {"read": "read", "write": "write", "mixed": "rw"}[pattern]
    return [
        *("fio", "--name=bench", "--ioengine=io_uring", "--direct=1", "--output-format=json"),
        *(f"--filename={path.replace(':', chr(92) + ':')}", f"--rw={kind}", "--rwmixread=50"),
        *("--bs=1M", "--iodepth=32", f"--size={nbytes}", "--overwrite=1", "--randrepeat=0"),
        *("--time_based=1", f"--runtime={max(1, round(DISK_WINDOW_S * 1000))}ms"),
        *settings,
    ]


def run_fio(command: list[str], tuned: bool) -> Sample:
    """{"gbps", "cpu_s_per_gb"} by fio's own clocks, which leave its start out.

    Raises ContenderError with fio's message when it fails.
    """
    if shutil.which(command[0]) is None:
        raise MissingError("there is no fio; install it (apt-get install fio) to compare with it")
    more = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if tuned else {}
    try:
        done = subprocess.run(command, env=os.environ | more, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=TIMEOUT_S)  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ContenderError(f"fio was not done after {TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise ContenderError(f"fio exit code {done.returncode}: {(said or ['nothing'])[-1]}")
    return fio_figures(done.stdout)


def fio_figures(output: str) -> Sample:
    """The rate and CPU of a job from fio's JSON, which notes may precede."""
    try:
        job: dict[str, Any] = json.loads(output[output.index("{") :])["jobs"][0]
        moved = sum(job[direction]["io_bytes"] for direction in ("read", "write"))
        runtime_s = max(job[direction]["runtime"] for direction in ("read", "write")) / 1e3
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    except (ValueError, LookupError) as error:
        raise ContenderError(f"cannot read fio's output: {error!r}") from error
    if not moved or job["error"]:
        raise ContenderError(f"fio moved {moved} bytes and reports error {job['error']}")
    return {"gbps": moved / 1e9 / max(runtime_s, 1e-3), "cpu_s_per_gb": cpu_s / (moved / 1e9)}


COLUMNS = (
    *((f"{p} GB/s", f"{p}_gbps", ranged()) for p in READ_SHARES),
    *((f"{p} CPU s/GB", f"{p}_cpu_s_per_gb", number(3)) for p in READ_SHARES),
)


def show(result: dict[str, Any]) -> Iterator[str]:
    """A row for each contender."""
    yield of_figures(
        f"bench.io {Path(result['path']).name}: files of {size(result['size'])}, median of"
        f" {result['rounds']} (least-most)",
        result["contenders"],
        COLUMNS,
    )
    yield from result["notes"]


PROGRAM = Program("bench.io", __doc__, options, run, show)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
