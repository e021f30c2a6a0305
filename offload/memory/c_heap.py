"""The C heap: memory that was freed but not given back to the system."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def trim_heap() -> None:
    """Gives free heap pages back, so that resident memory is what is in use.

    glibc keeps freed blocks of up to 32 MiB for reuse, and fragmentation can keep much of them:
    more than a budget that counts live bytes would tell. Nothing with other C libraries.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
