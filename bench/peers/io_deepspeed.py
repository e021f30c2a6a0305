"""File transfers with DeepSpeed's asynchronous I/O operator. A peer of bench.io (see serve.py).

Used as its swappers do: page-locked buffers, libaio with overlapped events, one handle for reads
and one for writes, so that both directions go on together in "mixed". A call moves half of the
buffers.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from typing import Any

import torch

from bench.peers.serve import process_cpu_s, serve


class DeepSpeedPeer:
    """Set-up: {"path", "shape", "threads"}; `threads` share one call. Request: {"pattern"}."""

    def __init__(self, setup: dict[str, Any]) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        deepspeed: Any = importlib.import_module("deepspeed")
        builders: Any = importlib.import_module("deepspeed.ops.op_builder")
        library = builders.AsyncIOBuilder().load(verbose=False)
        self.info: dict[str, Any] = {"deepspeed": deepspeed.__version__}
        self._path: str = setup["path"]
        self._shape: dict[str, Any] = setup["shape"]
        # block size, queue depth, single submit, overlapped events, threads
        settings = (self._shape["block_bytes"], self._shape["depth"], False, True, setup["threads"])
        self._reader, self._writer = (library.aio_handle(*settings) for _ in range(2))
        half = self._shape["in_flight"] // 2 * self._shape["request_bytes"]
        self._buffers = [
            self._reader.new_cpu_locked_tensor(half, torch.empty(0, dtype=torch.uint8)).random_()
            for _ in range(2)
        ]

    def sample(self, request: dict[str, Any]) -> dict[str, float]:
        pattern = request["pattern"]
        run = self._update_pass if pattern == "mixed" else self._pass
        moved_gb = 0.0
        cpu_s = process_cpu_s()
        begin_s = time.perf_counter()
        for _ in range(self._shape["passes"][pattern]):
            moved_gb += run(pattern) / 1e9
        seconds = time.perf_counter() - begin_s
        return {"gbps": moved_gb / seconds, "cpu_s_per_gb": (process_cpu_s() - cpu_s) / moved_gb}

    def _pass(self, pattern: str) -> int:
        """Both buffers are in flight, so the handle's threads always have work queued."""
        handle, submit = (
            (self._reader, self._reader.async_pread)
            if pattern == "read"
            else (self._writer, self._writer.async_pwrite)
        )
        moved = 0
        extents = self._extents()
        for first in range(0, len(extents), 2):
            for (offset, nbytes), buffer in zip(extents[first:], self._buffers, strict=False):
                _check(submit(buffer[:nbytes], self._path, offset) == 0)
                moved += nbytes
            _check(handle.wait() > 0)
        return moved

    def _update_pass(self, _: str) -> int:
        """One buffer is read into while the other, read before, is written back."""
        moved = 0
        read: tuple[torch.Tensor, int] | None = None
        for number, (offset, nbytes) in enumerate([*self._extents(), (0, 0)]):
            if nbytes:
                target = self._buffers[number % 2][:nbytes]
                _check(self._reader.async_pread(target, self._path, offset) == 0)
            if read is not None:
                _check(self._writer.async_pwrite(read[0], self._path, read[1]) == 0)
                _check(self._writer.wait() > 0)
            if nbytes:
                _check(self._reader.wait() > 0)
                read = (target, offset)
                moved += 2 * nbytes
        return moved

    def _extents(self) -> list[tuple[int, int]]:
        """(offset, bytes) of every call; the last may be shorter."""
        size, half = self._shape["size_bytes"], self._buffers[0].numel()
        return [(offset, min(half, size - offset)) for offset in range(0, size, half)]


def _check(good: bool) -> None:
    if not good:
        raise OSError("DeepSpeed's operator reports a failure; its message is in the log")


if __name__ == "__main__":
    sys.exit(serve(DeepSpeedPeer))
