"""What directories move per second when all are busy, as they are in an optimizer step."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    fill_randomly(arena)
    source, sink = arena.address, arena.address + nbytes
    area = range(0, AREA_BYTES, nbytes)
    files: list[int] = []
    try:
        for member in members:
            files.append(engine.add_file(member.fd, member.path))

        def fill(file: int) -> None:
            # What was allocated and never written is read without a look at the disk.
            transfer((engine.write(file, source, nbytes, offset) for offset in area), nbytes, DEPTH)

        def rate(file: int) -> float:
            offsets = itertools.cycle(area)
            turns = itertools.cycle(((engine.read, sink), (engine.write, source)))

            def start() -> IoOp:
                verb, address = next(turns)
                return verb(file, address, nbytes, next(offsets))

            return transfer(started_for(WINDOW_S, start), nbytes, DEPTH)

        with ThreadPoolExecutor(len(files)) as pool:
            list(pool.map(fill, files))
            return list(pool.map(rate, files))
    finally:
        for file in files:
            engine.remove_file(file)


def fill_randomly(arena: Arena) -> None:
    """Not zeros, which some disks do not write; and not from the generator of the user."""
    content = torch.from_dlpack(arena.export(0, arena.nbytes))  # type: ignore[attr-defined]
    content.random_(0, 256, generator=torch.Generator().manual_seed(0))


def started_for(seconds: float, start: Callable[[], IoOp]) -> Iterator[IoOp]:
    """Operations that are started when they are asked for, within `seconds`; at least one."""
    end = time.perf_counter() + seconds
    yield start()
    while time.perf_counter() < end:
        yield start()


def transfer(ops: Iterable[IoOp], nbytes: int, depth: int) -> float:
    """Bytes per second of operations of `nbytes` each, `depth` of them in flight at a time."""
    flying: deque[IoOp] = deque()
    begin = time.perf_counter()
    moved = 0
    for op in ops:
        flying.append(op)
        moved += nbytes
        if len(flying) == depth:
            flying.popleft().wait()
    for op in flying:
        op.wait()
    return moved / (time.perf_counter() - begin)
