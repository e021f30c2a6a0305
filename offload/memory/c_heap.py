"""The C heap: memory that was freed but not given back to the system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


@functools.cache
def _malloc_trim() -> Callable[[int], int]:
    try:
        trim = ctypes.CDLL(None).malloc_trim  # glibc only
    except (OSError, AttributeError):
        return lambda _: 0
    trim.argtypes = [ctypes.c_size_t]
    found: Callable[[int], int] = trim
    return found


def trim_heap() -> None:
    """Gives free heap pages back, so that resident memory is what is in use.

    glibc keeps freed blocks of up to 32 MiB for reuse, and fragmentation can keep much of them:
    more than a budget that counts live bytes would tell.
    """
    _malloc_trim()(0)
