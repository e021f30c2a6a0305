"""How fast hetero's I/O engines move chunks, and the file that every contender does it on.

Three patterns: "read" and "write" go through the file once per pass, in requests as large as chunks
are, several in flight. "mixed" is the optimizer step's: each extent is read, then written back,
while others are read; as many bytes are written as read, and both count.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from bench.peers.serve import process_cpu_s
from offload._native import Arena, IoEngine, IoOp
from offload.disk.bandwidth import fill_randomly, transfer
from offload.disk.directories import free_bytes
from offload.memory.sizes import PAGE_BYTES, format_bytes

PATTERNS = ("read", "write", "mixed")

REQUEST_BYTES = 64 << 20  # the most that one request moves
IN_FLIGHT = 4  # requests, each with a buffer of its own
FILE_PER_BUFFER = 16  # the file is at least so many requests: four times all buffers


@dataclass(frozen=True)
class Shape:
    """What every contender does. The file is whole requests; a request is whole blocks."""

    size_bytes: int  # of the file
    block_bytes: int
    depth: int  # blocks in flight
    request_bytes: int
    in_flight: int  # requests
    sample_bytes: int  # at least so many are moved per sample

    @classmethod
    def of(cls, size_bytes: int, block_bytes: int, depth: int, sample_bytes: int = 1) -> Shape:
        """Raises ValueError, naming the option, for what cannot be measured.

        The file becomes the most whole requests that are not larger than `size_bytes`.
        """
        if block_bytes < 1 or block_bytes % PAGE_BYTES:
            raise ValueError(f"--block must be a multiple of {PAGE_BYTES} bytes, got {block_bytes}")
        if not 1 <= depth <= 4096:
            raise ValueError(f"--depth must be from 1 to 4096, got {depth}")
        request = min(REQUEST_BYTES, size_bytes // FILE_PER_BUFFER) // block_bytes * block_bytes
        # With fewer blocks than these the pattern itself would keep the queue from being full.
        if IN_FLIGHT // 2 * request < depth * block_bytes:
            least = FILE_PER_BUFFER * -(-depth // (IN_FLIGHT // 2)) * block_bytes
            if IN_FLIGHT // 2 * REQUEST_BYTES // block_bytes < depth:
                raise ValueError(
                    f"{depth} blocks of {format_bytes(block_bytes)} in flight are more than the"
                    f" buffers hold ({format_bytes(IN_FLIGHT // 2 * REQUEST_BYTES)});"
                    f" lower --depth or --block"
                )
            raise ValueError(
                f"--size of {format_bytes(size_bytes)} is too small for {depth} blocks of"
                f" {format_bytes(block_bytes)} in flight; the least is {format_bytes(least)}"
            )
        size_bytes -= size_bytes % request
        return cls(size_bytes, block_bytes, depth, request, IN_FLIGHT, sample_bytes)

    def passes(self, pattern: str) -> int:
        """How often a sample of `pattern` goes through the file."""
        return max(1, -(-self.sample_bytes // (self.size_bytes * bytes_per_byte(pattern))))

    def moved_bytes(self, pattern: str) -> int:
        """What a sample of `pattern` moves, both directions together."""
        return self.passes(pattern) * self.size_bytes * bytes_per_byte(pattern)

    def to_dict(self) -> dict[str, Any]:
        """For peers, which import none of this."""
        return asdict(self) | {"passes": {pattern: self.passes(pattern) for pattern in PATTERNS}}


def bytes_per_byte(pattern: str) -> int:
    """Bytes moved per byte of the file in one pass."""
    if pattern not in PATTERNS:
        raise ValueError(f"unknown pattern {pattern!r}; known: {', '.join(PATTERNS)}")
    return 2 if pattern == "mixed" else 1


@contextlib.contextmanager
def measured_file(directory: str, size_bytes: int) -> Iterator[str]:
    """A file of `size_bytes` written random bytes in `directory`, removed in the end.

    It has a name, because other programs open it. Written, because a filesystem turns the first
    write to a reserved extent into two. Raises ValueError for a directory that cannot be used, is
    too full, or has no O_DIRECT.
    """
    if not os.path.isdir(directory):
        raise ValueError(f"--path {directory} is not a directory; make it first")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ValueError(f"--path {directory} is not writable for this user; choose another")
    available = free_bytes(directory)
    if size_bytes > available:
        raise ValueError(
            f"{directory}: --size {format_bytes(size_bytes)} is more than the"
            f" {format_bytes(available)} that are free; free space or lower --size"
        )
    fd, path = tempfile.mkstemp(prefix="hetero-bench-", dir=directory)
    try:
        with os.fdopen(fd, "wb", buffering=0):
            os.posix_fallocate(fd, 0, size_bytes)
            # Incompressible, and no two pages of the file alike for what stores blocks only once.
            tile = bytearray(os.urandom(min(size_bytes, 1 << 20)))
            for offset in range(0, size_bytes, len(tile)):
                for at in range(0, len(tile), PAGE_BYTES):
                    tile[at : at + 8] = (offset + at).to_bytes(8, "little")
                _write_all(fd, memoryview(tile)[: size_bytes - offset], offset)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            os.close(os.open(path, os.O_RDWR | os.O_DIRECT))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            raise ValueError(
                f"--path {directory}: the filesystem has no O_DIRECT, so the page cache would be"
                f" measured; choose another"
            ) from error
        yield path
    finally:
        os.unlink(path)


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


class HeteroTransfers:
    """One engine on one file, with one registered arena for its requests.

    Close it after use (it is a context manager). The constructor raises what IoEngine raises.
    """

    def __init__(self, kind: str, path: str, shape: Shape) -> None:
        self.shape = shape
        self.arena = Arena(shape.in_flight * shape.request_bytes)
        fill_randomly(self.arena)
        self.engine = IoEngine(kind, shape.depth, shape.block_bytes)
        fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        try:
            self._file = self.engine.add_file(fd, path)
        finally:
            os.close(fd)
        self.engine.register(self.arena)
        self.notes = [f"hetero {kind}: {note}" for note in self.engine.notes]

    def __enter__(self) -> HeteroTransfers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for what is in flight and joins the engine's threads; idempotent."""
        self.engine.close()

    def sample(self, pattern: str) -> dict[str, float]:
        """{"gbps", "cpu_s_per_gb"} of one sample; CPU is all of this process during it."""
        moved_gb = self.shape.moved_bytes(pattern) / 1e9
        cpu_s = process_cpu_s()
        begin_s = time.perf_counter()
        for _ in range(self.shape.passes(pattern)):
            if pattern == "mixed":
                self._update_pass()
            else:
                ops = (self._start(pattern, number) for number in range(self._requests))
                transfer(ops, self.shape.request_bytes, self.shape.in_flight)
        seconds = time.perf_counter() - begin_s
        cpu_s = process_cpu_s() - cpu_s
        return {"gbps": moved_gb / seconds, "cpu_s_per_gb": cpu_s / moved_gb}

    @property
    def _requests(self) -> int:
        return self.shape.size_bytes // self.shape.request_bytes

    def _start(self, verb: str, number: int) -> IoOp:
        """Starts the request of that number, with the buffer whose turn it is."""
        nbytes = self.shape.request_bytes
        address = self.arena.address + number % self.shape.in_flight * nbytes
        submit = self.engine.read if verb == "read" else self.engine.write
        return submit(self._file, address, nbytes, number * nbytes)

    def _update_pass(self) -> None:
        """Half of the buffers are being read into while the other half is written from."""
        ahead = self.shape.in_flight // 2
        reads: deque[IoOp] = deque()
        writes: deque[IoOp] = deque()
        for number in range(self._requests + ahead):
            if number < self._requests:
                if number >= self.shape.in_flight:  # its buffer is free
                    writes.popleft().wait()
                reads.append(self._start("read", number))
            if number >= ahead:
                reads.popleft().wait()
                writes.append(self._start("write", number - ahead))
        for op in writes:
            op.wait()
