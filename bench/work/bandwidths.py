"""How fast memory, a disk and an emulated link move bytes while nothing else goes on.

Memory and disks are measured as `hetero profile` measures them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from bench.harness.rounds import Sample
from offload._native import Arena, Link
from offload.disk.bandwidth import fill_randomly
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
    tell = partial(print, file=sys.stderr, flush=True)
    with open_disk([path], tell, area_bytes=area_bytes, window_s=DISK_WINDOW_S) as rate:
        yield lambda read_share: {"gbps": rate(read_share) / 1e9}


def link_alone(gbps: float) -> Callable[[], Sample]:
    """Samples {"gbps"}: what an emulated link of `gbps` moves in one direction."""
    arena = Arena(2 * LINK_COPY_BYTES)
    fill_randomly(arena)

    def sample() -> Sample:
        with closing(Link(gbps * 1e9, gbps * 1e9)) as link:
            begin_s = time.perf_counter()
            to, source = arena.address, arena.address + LINK_COPY_BYTES
            ops = [link.copy("h2d", to, source, LINK_COPY_BYTES) for _ in range(LINK_COPIES)]
            for op in ops:
                op.wait()
            seconds = time.perf_counter() - begin_s
        return {"gbps": LINK_COPIES * LINK_COPY_BYTES / seconds / 1e9}

    return sample
