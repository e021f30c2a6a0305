"""CRC-32C (RFC 3720) of bytes in memory."""

from __future__ import annotations

import numpy as np

from offload._native import crc32c


def crc_of(content: bytes | memoryview, crc: int = 0) -> int:
    """The checksum of `content`, which follows what has the checksum `crc`; nothing is copied."""
    if not len(content):
        return crc
    array = np.frombuffer(content, dtype=np.uint8)
    return crc32c(int(array.ctypes.data), len(array), crc)
