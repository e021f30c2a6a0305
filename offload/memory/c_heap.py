"""The C heap: memory that was freed, or is about to be, and goes back to the system."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

_M_MMAP_THRESHOLD = -3  # malloc.h
_LARGE_BYTES = 1 << 20


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
