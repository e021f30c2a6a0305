"""How what contenders do is timed, and their memory read: the same for hetero and every peer."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path


def kernel_bytes(*names: str, pid: int | str = "self") -> dict[str, int]:
    """Bytes that Linux counts of a process, by their names in /proc/PID/status; none once it has no
    memory any more. Raises OSError when it is gone."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    return {name: int(found[name].split()[0]) * 1024 for name in names if name in found}


class MemoryAbove:
    """How far the process's resident memory rises above what it was; a context manager.

    `nbytes` is set at the end. Pages of files that were read or written are not in it, unless they
    are mapped. Linux's /proc/self/clear_refs resets the peak; OSError where there is none.
    """

    def __init__(self) -> None:
        self.nbytes = 0

    def __enter__(self) -> MemoryAbove:
        gc.collect()
        # What the C library keeps of freed memory would hide that it is used again.
        with suppress(AttributeError, OSError):  # a C library that has no such function
            ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self._before = kernel_bytes("VmHWM")["VmHWM"]  # as much as there is now
        return self

    def __exit__(self, *_: object) -> None:
        self.nbytes = max(0, kernel_bytes("VmHWM")["VmHWM"] - self._before)


def timed(body: Callable[[], object]) -> dict[str, float]:
    """{"s", "above_bytes"} of one call."""
    with MemoryAbove() as above:
        begin_s = time.perf_counter()
        body()
        seconds = time.perf_counter() - begin_s
    return {"s": seconds, "above_bytes": above.nbytes}


def steps_beside(
    begin: Callable[[], Callable[[], object]], step: Callable[[], object]
) -> dict[str, float]:
    """Makes steps, one at least, until a save has ended that goes on beside them.

    `begin` starts the save and returns what waits for its end. The result: {"pause_s", for which
    `begin` kept training; "beside_s", until the end; "steps" that began before the end; "step_s",
    their mean; "above_bytes"}. Raises what the save has met.
    """

    def time_after(wait: Callable[[], object]) -> float:
        wait()
        return time.perf_counter()

    with ThreadPoolExecutor(1) as watcher, MemoryAbove() as above:
        begin_s = time.perf_counter()
        wait = begin()
        begun_s = time.perf_counter()
        ended = watcher.submit(time_after, wait)
        steps = 0
        while steps == 0 or not ended.done():
            step()
            steps += 1
        made_s = time.perf_counter()
        beside_s = ended.result() - begin_s
    return {
        "pause_s": begun_s - begin_s,
        "beside_s": beside_s,
        "steps": steps,
        "step_s": (made_s - begun_s) / steps,
        "above_bytes": above.nbytes,
    }


def with_rate(figures: dict[str, float], folder: Path) -> dict[str, float]:
    """The figures of a save or load of all files in a folder and below, with their bytes."""
    nbytes = sum(path.stat().st_size for path in _files(folder))
    return {**figures, "bytes": nbytes, "gbps": nbytes / figures["s"] / 1e9}


def drop_pages(folder: Path) -> None:
    """The page cache gives up the folder's files, which are durable: reads come from the disk."""
    for path in _files(folder):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
