"""File transfers with aiofiles: what pure Python gives. A peer of bench.io (see serve.py).

Buffered, as aiofiles is used, but the page cache is not what is measured: reads begin with the
file's pages dropped, and writes end with fsync. As many requests are in flight as elsewhere, each
in one of aiofiles' threads, into memory that is allocated once.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import time
from typing import Any

from bench.peers.serve import process_cpu_s, serve


class AiofilesPeer:
    """Set-up: {"path", "shape"} as of Shape.to_dict(). Request: {"pattern"}."""

    def __init__(self, setup: dict[str, Any]) -> None:
        # By name, because type checking must not need it.
        self._aiofiles: Any = importlib.import_module("aiofiles")
        self.info: dict[str, Any] = {"python": sys.version.split()[0]}
        self._path: str = setup["path"]
        self._shape: dict[str, Any] = setup["shape"]
        request = self._shape["request_bytes"]
        self._buffers = [bytearray(os.urandom(request)) for _ in range(self._shape["in_flight"])]
        self._loop = asyncio.new_event_loop()
        self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)

    def sample(self, request: dict[str, Any]) -> dict[str, float]:
        pattern = request["pattern"]
        moved_gb = 0.0
        self._drop_pages()
        cpu_s = process_cpu_s()
        begin_s = time.perf_counter()
        for _ in range(self._shape["passes"][pattern]):
            moved_gb += self._loop.run_until_complete(self._pass(pattern)) / 1e9
            if pattern != "read":
                os.fsync(self._fd)
            self._drop_pages()
        seconds = time.perf_counter() - begin_s
        return {"gbps": moved_gb / seconds, "cpu_s_per_gb": (process_cpu_s() - cpu_s) / moved_gb}

    def _drop_pages(self) -> None:
        """Takes effect because all pages are clean."""
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    async def _pass(self, pattern: str) -> int:
        """Every worker takes the next extent; returns the bytes moved."""
        offsets = iter(range(0, self._shape["size_bytes"], self._shape["request_bytes"]))
        moved = await asyncio.gather(
            *(self._worker(pattern, buffer, offsets) for buffer in self._buffers)
        )
        return sum(moved)

    async def _worker(self, pattern: str, buffer: bytearray, offsets: Any) -> int:
        moved = 0
        async with self._aiofiles.open(self._path, "r+b", buffering=0) as file:
            for offset in offsets:
                if pattern in ("read", "mixed"):
                    await file.seek(offset)
                    moved += await _all(file.readinto, buffer)
                if pattern in ("write", "mixed"):
                    await file.seek(offset)
                    moved += await _all(file.write, buffer)
        return moved


async def _all(call: Any, buffer: bytearray) -> int:
    """An unbuffered file may move less than it was asked to."""
    rest = memoryview(buffer)
    while rest:
        moved = await call(rest)
        if not moved:
            raise OSError("the file ended early")
        rest = rest[moved:]
    return len(buffer)


if __name__ == "__main__":
    sys.exit(serve(AiofilesPeer))
