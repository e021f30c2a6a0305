"""How fast memory and an emulated link move bytes while nothing else goes on."""

from __future__ import annotations

import time

import torch

from offload import _native
from offload._native import Arena, Link

STREAM_NUMEL = 16 << 20  # four arrays of 64 MiB: no cache holds them
STREAM_BYTES = 28  # per element
STREAM_PASSES = 4

LINK_COPY_BYTES = 64 << 20
LINK_COPIES = 4


class MemoryBandwidth:
    """How fast the update's threads get through memory with next to no arithmetic."""

    def __init__(self) -> None:
        self._arrays = [torch.zeros(STREAM_NUMEL) for _ in range(4)]

    def sample(self) -> dict[str, float]:
        """One sample: {"gbps"}."""
        p, g, m, v = (array.data_ptr() for array in self._arrays)
        begin_s = time.perf_counter()
        for _ in range(STREAM_PASSES):
            _native.stream(p, g, m, v, STREAM_NUMEL)
        seconds = time.perf_counter() - begin_s
        return {"gbps": STREAM_PASSES * STREAM_NUMEL * STREAM_BYTES / seconds / 1e9}


class LinkBandwidth:
    """What an emulated link moves in one direction when nothing else goes on."""

    def __init__(self, gbps: float) -> None:
        self._gbps = gbps
        self._arena = Arena(2 * LINK_COPY_BYTES)
        torch.from_dlpack(self._arena.export(0, self._arena.nbytes)).zero_()  # type: ignore[attr-defined]

    def sample(self) -> dict[str, float]:
        """One sample: {"gbps"}."""
        link = Link(self._gbps * 1e9, self._gbps * 1e9)
        try:
            begin_s = time.perf_counter()
            to, source = self._arena.address, self._arena.address + LINK_COPY_BYTES
            ops = [link.copy("h2d", to, source, LINK_COPY_BYTES) for _ in range(LINK_COPIES)]
            for op in ops:
                op.wait()
            seconds = time.perf_counter() - begin_s
        finally:
            link.close()
        return {"gbps": LINK_COPIES * LINK_COPY_BYTES / seconds / 1e9}
