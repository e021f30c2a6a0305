"""NUMA nodes that a test makes up, and where pages are."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from offload import _native

# Numbers on this architecture.
if os.uname().machine == "x86_64":
    SCHED_SETAFFINITY, MADVISE, SET_MEMPOLICY, MOVE_PAGES = 203, 28, 238, 279
else:
    SCHED_SETAFFINITY, MADVISE, SET_MEMPOLICY, MOVE_PAGES = 122, 233, 237, 239

CPUS = sorted(os.sched_getaffinity(0))
# A CPU for each, of which the kernel may refuse the second: then threads stay where they are.
TWO_NODES = [[CPUS[0]], [CPUS[-1] if len(CPUS) > 1 else 1023]]

_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def numa_nodes(cpus: Sequence[Sequence[int]]) -> Iterator[None]:
    """The process has these nodes meanwhile."""
    _native.numa.set_nodes(cpus)
    try:
        yield
    finally:
        _native.numa.set_nodes([])


def resident(address: int, nbytes: int) -> list[bool]:
    """Whether each page from `address`, a page's, on is in memory."""
    pages = -(-nbytes // mmap.PAGESIZE)
    found = ctypes.create_string_buffer(pages)
    assert _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), found) == 0
    return [bool(byte & 1) for byte in found.raw]


def kernels_nodes(address: int, nbytes: int) -> list[int]:
    """The node of each page, by the kernel's numbers; negative if it is in no memory."""
    pages = -(-nbytes // mmap.PAGESIZE)
    addresses = (ctypes.c_void_p * pages)(*range(address, address + nbytes, mmap.PAGESIZE))
    found = (ctypes.c_int * pages)()
    done = _libc.syscall(MOVE_PAGES, 0, ctypes.c_ulong(pages), addresses, None, found, 0)
    assert done == 0, os.strerror(ctypes.get_errno())
    return list(found)
