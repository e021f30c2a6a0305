"""Memory that this process holds, and may hold, as the operating system says; and the C heap, whose
free memory goes back to the system."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from offload.cgroups import folders

_STATM = "/proc/self/statm"
_M_MMAP_THRESHOLD = -3  # malloc.h
_LARGE_BYTES = 1 << 20  # of blocks of the heap
_MARGIN_BYTES = 24 << 20  # what allocators keep, and libraries for a moment; less of small limits


def margin_bytes(limit_bytes: int) -> int:
    """What is left free below a limit: a process never takes the same memory twice."""
    return min(limit_bytes // 16, limit_bytes // 64 + _MARGIN_BYTES)


class ProcessExcess:
    """By how many bytes this process is larger than it may be, which something in it can free."""

    def __init__(self, limit_bytes: int, managed_bytes: Callable[[], int]) -> None:
        """`limit_bytes` of resident memory are what it may have, but for a small margin, and
        `managed_bytes` the part that a ledger counts.

        From now on memory that is freed leaves the process, so that its size says what it uses.
        """
        return_large_blocks()
        self._managed_bytes = managed_bytes
        self._peak_beside_bytes = 0
        self._margin = margin_bytes(limit_bytes)
        self._limit = limit_bytes - self._margin
        self._trimmed_at = 0  # resident bytes after the heap was trimmed last

    def __call__(self, soon_bytes: int) -> int:
        """Bytes too many when `soon_bytes` more will be there; 0: none.

        Some 20 microseconds, unless the heap has free pages to give back first.
        """
        limit = self._limit - soon_bytes
        nbytes = resident_bytes()
        beside_bytes = nbytes - self._managed_bytes()
        self._peak_beside_bytes = max(self._peak_beside_bytes, beside_bytes)
        if nbytes > limit and nbytes - self._trimmed_at > self._margin // 2:
            trim_heap()
            nbytes = self._trimmed_at = resident_bytes()
        return max(0, nbytes - limit)

    def take_peak_beside(self) -> int:
        """The most bytes that no ledger counted at any call since this was asked last."""
        peak, self._peak_beside_bytes = self._peak_beside_bytes, 0
        return peak


def resident_bytes() -> int:
    """Resident bytes of this process now."""
    # (Not open(), which takes twice as long: with a limit each saved tensor asks.)
    file = os.open(_STATM, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(file, 128).split()[1]) * mmap.PAGESIZE
    finally:
        os.close(file)


def peak_resident_bytes() -> int:
    """The most resident bytes that this program ever had.

    ru_maxrss survives exec: in a small program started by a large one it is the large one's.
    """
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        (peak,) = (line for line in file if line.startswith("VmHWM:"))
    return int(peak.split()[1]) << 10


def allowed_bytes() -> int | None:
    """What the system lets this process hold: the least of its cgroups' limits and RLIMIT_AS.

    None without a limit. RLIMIT_AS is of addresses, of which a process has more than it holds.
    """
    limits = _cgroup_limits()
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    return min(limits, default=None)


def _cgroup_limits(root: Path = Path("/")) -> list[int]:
    names = ("memory.max", "memory.limit_in_bytes")  # of version 2, and of version 1
    found = (_number(folder / name) for folder in folders("memory", root) for name in names)
    return [limit for limit in found if limit is not None]


def _number(path: Path) -> int | None:
    try:
        value = int(path.read_text())
    except (OSError, ValueError):  # ("max")
        return None
    return value if value < 1 << 62 else None


def trim_heap() -> None:
    """Gives free heap pages back, so that resident memory is what is in use.

    glibc keeps freed blocks of up to 32 MiB for reuse, and fragmentation can keep much of them:
    more than a budget that counts live bytes would tell. Nothing with other C libraries.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def return_large_blocks() -> None:
    """From now on freed blocks of a MiB and more go back to the system at once.

    glibc would learn to keep blocks of up to 32 MiB in its heaps, where what is freed between
    others stays resident. Each such block then costs its page faults anew, some 0.3 ms a MiB.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def discard_pages(address: int, nbytes: int) -> None:
    """Gives back the pages wholly inside memory whose owner is about to free it.

    What they had is lost. The heap would keep them for reuse, as trim_heap() says, and this takes
    one call of the system for just them.
    """
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        with suppress(OSError, AttributeError):
            madvise = ctypes.CDLL(None).madvise
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
