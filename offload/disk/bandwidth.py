"""What directories move per second when all are busy, as they are in an optimizer step."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from offload._native import Arena, IoEngine, IoOp
from offload.disk.file_member import MemberFile

AREA_BYTES = 32 << 20  # per directory; small enough to be written quickly first
WINDOW_S = 0.25
# Requests in flight per directory, reads and writes in turn. An engine of threads has as many
# threads per directory and gets requests of one block each, so a slow directory never holds threads
# that the others need. io_uring has room for more, and gets larger ones: starting a request takes
# the interpreter's lock, which all directories share.
DEPTH = 4
_REQUEST_BYTES = {"threads": 1 << 20, "io_uring": 4 << 20}


def measure_rates(engine: IoEngine, members: Sequence[MemberFile]) -> list[float]:
    """Bytes read and written per second by each member while all transfer, for WINDOW_S.

    The first AREA_BYTES of every member must be allocated; they are overwritten. Takes memory for
    two requests (2 or 8 MiB). Raises NativeIoError.
    """
    nbytes = _REQUEST_BYTES[engine.kind]
    arena = Arena(2 * nbytes)
    # Not zeros, which some devices do not write; and not from torch's global generator, whose
    # numbers are the user's.
    content = torch.from_dlpack(arena.export(0, nbytes))  # type: ignore[attr-defined]
    content.random_(0, 256, generator=torch.Generator().manual_seed(0))
    source, sink = arena.address, arena.address + nbytes
    files: list[int] = []
    try:
        for member in members:
            files.append(engine.add_file(member.fd, member.path))

        def fill(file: int) -> None:
            # What was allocated and never written is read without a look at the disk.
            offsets = range(0, AREA_BYTES, nbytes)
            ops = [engine.write(file, source, nbytes, offset) for offset in offsets]
            for op in ops:
                op.wait()

        def rate(file: int) -> float:
            offsets = itertools.cycle(range(0, AREA_BYTES, nbytes))
            turns = itertools.cycle(((engine.read, sink), (engine.write, source)))
            flying: deque[IoOp] = deque()
            begin = now = time.perf_counter()
            moved = 0
            while flying or not moved:
                while len(flying) < DEPTH and now < begin + WINDOW_S:
                    start, address = next(turns)
                    flying.append(start(file, address, nbytes, next(offsets)))
                flying.popleft().wait()
                moved += nbytes
                now = time.perf_counter()
            return moved / (now - begin)

        with ThreadPoolExecutor(len(files)) as pool:
            list(pool.map(fill, files))
            return list(pool.map(rate, files))
    finally:
        for file in files:
            engine.remove_file(file)
