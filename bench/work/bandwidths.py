"""How fast memory, a disk and an emulated link move bytes while nothing else goes on.

Memory and disks are measured as `hetero profile` measures them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from bench.harness.rounds import Sample
from offload._native import Arena, Link
from offload.profile.measure import UpdateArrays, open_disk

STREAM_NUMEL = 16 << 20  # four arrays of 64 MiB: no cache holds them
LINK_COPY_BYTES = 64 << 20
LINK_COPIES = 4
DISK_WINDOW_S = 1.0


def memory_alone() -> Callable[[], Sample]:
    """Samples {"gbps"}: what the update's threads get through with next to no arithmetic."""
    arrays = UpdateArrays(STREAM_NUMEL)
    return lambda: {"gbps": arrays.stream() / 1e9}


@contextmanager
def disk_alone(path: str, area_bytes: int) -> Iterator[Callable[[float], Sample]]:
    """Samples {"gbps"} of transfers in a file of `area_bytes`, of which a share (0 to 1) reads.

    Raises ValueError for what is no directory.
    """
    if not Path(path).is_dir():
        raise ValueError(f"--path {path} is not a directory; make it first")

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with open_disk([path], tell, area_bytes=area_bytes, window_s=DISK_WINDOW_S) as rate:
        yield lambda read_share: {"gbps": rate(read_share) / 1e9}


class LinkBandwidth:
    """What an emulated link moves in one direction when nothing else goes on."""

    def __init__(self, gbps: float) -> None:
        self._gbps = gbps
        self._arena = Arena(2 * LINK_COPY_BYTES)
        torch.from_dlpack(self._arena.export(0, self._arena.nbytes)).zero_()  # type: ignore[attr-defined]

    def sample(self) -> Sample:
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
