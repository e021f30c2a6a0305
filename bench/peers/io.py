"""File transfers with aiofiles, or with DeepSpeed's operator. A peer of bench.io (see serve.py).

aiofiles is what pure Python gives: buffered, as it is used, but the page cache is not what is
measured: reads begin with the file's pages dropped, and writes end with fsync. As many requests are
in flight as elsewhere, each in one of its threads, into memory that is allocated once.

DeepSpeed's operator is used as its swappers do: page-locked buffers, libaio with overlapped events,
one handle for reads and one for writes, so that both directions go on together in "mixed". A call
moves half of the buffers.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import time
from typing import Any

from bench.peers.serve import process_cpu_s, serve


class TransferPeer:
    """Set-up: {"path", "shape"} as of Shape.to_dict(). Request: {"pattern"}."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.info: dict[str, Any] = {"python": sys.version.split()[0]}
        self.path: str = setup["path"]
        self.shape: dict[str, Any] = setup["shape"]

    def sample(self, request: dict[str, Any]) -> dict[str, float]:
        pattern = request["pattern"]
        moved_gb = 0.0
        self.prepare()
        cpu_s = process_cpu_s()
        begin_s = time.perf_counter()
        for _ in range(self.shape["passes"][pattern]):
            moved_gb += self.move(pattern) / 1e9
        seconds = time.perf_counter() - begin_s
        return {"gbps": moved_gb / seconds, "cpu_s_per_gb": (process_cpu_s() - cpu_s) / moved_gb}

    def prepare(self) -> None:
        """Before the clock is started."""

    def move(self, pattern: str) -> int:
        """Goes through the file once; returns the bytes moved."""
        raise NotImplementedError


class AiofilesPeer(TransferPeer):
    """With aiofiles."""

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        # By name, because type checking must not need it.
        self._aiofiles: Any = importlib.import_module("aiofiles")
        request, count = self.shape["request_bytes"], self.shape["in_flight"]
        self._buffers = [bytearray(os.urandom(request)) for _ in range(count)]
        self._loop = asyncio.new_event_loop()
        self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)

    def prepare(self) -> None:
        """The page cache gives up the file, whose pages are clean."""
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def move(self, pattern: str) -> int:
        moved = self._loop.run_until_complete(self._pass(pattern))
        if pattern != "read":
            os.fsync(self._fd)
        self.prepare()
        return moved

    async def _pass(self, pattern: str) -> int:
        """Every worker takes the next extent."""
        offsets = iter(range(0, self.shape["size_bytes"], self.shape["request_bytes"]))
        workers = (self._worker(pattern, buffer, offsets) for buffer in self._buffers)
        return sum(await asyncio.gather(*workers))

    async def _worker(self, pattern: str, buffer: bytearray, offsets: Any) -> int:
        moved = 0
        async with self._aiofiles.open(self.path, "r+b", buffering=0) as file:
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


class DeepSpeedPeer(TransferPeer):
    """With DeepSpeed's operator. Set-up: "threads", too, which share one call."""

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        import torch

        from bench.peers.world import deepspeed_module

        library = deepspeed_module("deepspeed.ops.op_builder").AsyncIOBuilder().load(verbose=False)
        self.info = {"deepspeed": deepspeed_module().__version__}
        # block size, queue depth, single submit, overlapped events, threads
        settings = (self.shape["block_bytes"], self.shape["depth"], False, True, setup["threads"])
        self._reader, self._writer = (library.aio_handle(*settings) for _ in range(2))
        half = self.shape["in_flight"] // 2 * self.shape["request_bytes"]
        empty = torch.empty(0, dtype=torch.uint8)
        self._buffers = [
            self._reader.new_cpu_locked_tensor(half, empty).random_() for _ in range(2)
        ]

    def move(self, pattern: str) -> int:
        size: int = self.shape["size_bytes"]
        half = self._buffers[0].numel()
        extents = [(offset, min(half, size - offset)) for offset in range(0, size, half)]
        if pattern == "mixed":
            return self._update_pass(extents)
        read = pattern == "read"
        handle = self._reader if read else self._writer
        submit = handle.async_pread if read else handle.async_pwrite
        # Both buffers are in flight, so the handle's threads always have work queued.
        for first in range(0, len(extents), 2):
            for (offset, nbytes), buffer in zip(extents[first:], self._buffers, strict=False):
                _check(submit(buffer[:nbytes], self.path, offset) == 0)
            _check(handle.wait() > 0)
        return size

    def _update_pass(self, extents: list[tuple[int, int]]) -> int:
        """One buffer is read into while the other, read before, is written back."""
        read: tuple[Any, int] | None = None
        for number, (offset, nbytes) in enumerate([*extents, (0, 0)]):
            if nbytes:
                target = self._buffers[number % 2][:nbytes]
                _check(self._reader.async_pread(target, self.path, offset) == 0)
            if read is not None:
                _check(self._writer.async_pwrite(read[0], self.path, read[1]) == 0)
                _check(self._writer.wait() > 0)
            if nbytes:
                _check(self._reader.wait() > 0)
                read = (target, offset)
        return 2 * sum(nbytes for _, nbytes in extents)


def _check(good: bool) -> None:
    if not good:
        raise OSError("DeepSpeed's operator reports a failure; its message is in the log")


if __name__ == "__main__":
    sys.exit(serve(DeepSpeedPeer if sys.argv[1:] == ["deepspeed"] else AiofilesPeer))
