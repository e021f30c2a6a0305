"""How fast memory and a disk move bytes while nothing else goes on, as hetero profile has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.harness.program import tell
from bench.harness.rounds import Sample
from offload.profile.measure import UpdateArrays, open_disk

STREAM_NUMEL = 16 << 20  # four arrays of 64 MiB: no cache holds them
DISK_WINDOW_S = 1.0


def memory_alone() -> Callable[[], Sample]:
    """Samples {"gbps"}: what the update's threads get through with next to no arithmetic."""
    arrays = UpdateArrays(STREAM_NUMEL)
    return lambda: {"gbps": arrays.stream() / 1e9}


@contextmanager
def disk_alone(path: str, area_bytes: int, **options: int) -> Iterator[Callable[[float], Sample]]:
    """Samples {"gbps"} of transfers in a file of `area_bytes`, of which a share (0 to 1) reads.

    `options` are further ones of open_disk(). Raises ValueError for what is no directory.
    """
    if not Path(path).is_dir():
        raise ValueError(f"--path {path} is not a directory; make it first")
    options["area_bytes"] = area_bytes
    with open_disk([path], tell, window_s=DISK_WINDOW_S, **options) as rate:
        yield lambda read_share: {"gbps": rate(read_share) / 1e9}
