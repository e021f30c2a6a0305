"""Writes one data file of a checkpoint: safetensors, past the page cache, with a checksum each."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from hetero.checkpoint.checksum import crc_of
from hetero.checkpoint.safetensors_header import Header, encode
from offload._native import IoEngine, IoOp, NativeIoError, crc32c
from offload.disk.directories import format_free
from offload.disk.scratch_file import make_io_engine
from offload.errors import StoreError
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.sizes import PAGE_BYTES, format_bytes, round_up
from offload.memory.tiers import Account, Tier

CHECKSUMS = "crc32c"  # the header's metadata: eight hexadecimal digits per entry, in file order
PADDING = "padding@"  # entries that only make the next one begin at a page
_BUFFER_BYTES = 4 << 20
_BUFFERS = 4


@dataclass(frozen=True)
class Region:
    """Entries that are written one after the other: `name`, dtype and number of elements of each.

    Regions are written in any order: each begins at a page.
    """

    entries: Sequence[tuple[str, torch.dtype, int]]

    @property
    def nbytes(self) -> int:
        """Bytes of the entries, without padding."""
        return sum(dtype.itemsize * numel for _, dtype, numel in self.entries)


@dataclass(frozen=True)
class WrittenFile:
    """What a checkpoint's manifest says of a data file."""

    nbytes: int
    header_nbytes: int
    header_crc32c: int


def open_direct(path: Path, flags: int) -> int:
    """Opens a file past the page cache if its filesystem can do that; returns the descriptor.

    Raises StoreError.
    """
    try:
        try:
            return os.open(path, flags | os.O_CLOEXEC | os.O_DIRECT, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return os.open(path, flags | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StoreError(error.errno, f"cannot open it: {error.strerror}", str(path)) from error


class DataWriter:
    """A new data file, whose regions are written by one thread through a few MiB of buffers.

    Its space is allocated at once, so that a full disk is an error before anything is written.
    finish() makes it durable; without it close() leaves the file as it is.
    """

    def __init__(self, path: Path, regions: Sequence[Region], io_engine: str) -> None:
        """Raises StoreError if the file cannot be made; `io_engine` is as in Config."""
        self._path = path
        self._entries: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
        self._first: list[int] = []  # by region, the number of its first entry
        for number, region in enumerate(regions):
            self._first.append(len(self._entries))
            self._entries += [(name, dtype, (numel,)) for name, dtype, numel in region.entries]
            padding = -region.nbytes % PAGE_BYTES
            if padding:
                self._entries.append((f"{PADDING}{number}", torch.uint8, (padding,)))
        self._crcs = [0] * len(self._entries)
        head, self._header = self._encoded()
        self._placed = list(self._header.entries.values())
        self._nbytes = len(head) + (self._placed[-1].end if self._placed else 0)
        self._resources = ExitStack()
        try:
            self._open(io_engine)
        except BaseException:
            self.close()
            raise

    def _encoded(self) -> tuple[bytes, Header]:
        checksums = "".join(f"{crc:08x}" for crc in self._crcs)
        return encode(self._entries, {CHECKSUMS: checksums}, alignment=PAGE_BYTES)

    def _open(self, io_engine: str) -> None:
        self._fd = open_direct(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self._resources.callback(os.close, self._fd)
        self._allocate()
        self._io: IoEngine
        self._io, _ = make_io_engine(io_engine)
        self._resources.callback(self._io.close)
        self._file = self._io.add_file(self._fd, str(self._path))
        # (In no budget: a few MiB beside it, as docs/design.md says.)
        ledger = Ledger(dict.fromkeys(Tier))
        self._arena = HostArena(_BUFFERS, _BUFFER_BYTES, ledger, Account.BUFFER)
        self._resources.callback(self._arena.close)
        self._arena.commit(0, _BUFFERS)
        self._io.register(self._arena.memory)
        self._views = [self._arena.view(slot, 1, torch.uint8) for slot in range(_BUFFERS)]
        self._under_way: deque[tuple[int, IoOp]] = deque()
        self._free = list(range(_BUFFERS))

    def _allocate(self) -> None:
        nbytes = round_up(self._nbytes, PAGE_BYTES)
        try:
            os.posix_fallocate(self._fd, 0, nbytes)
        except OSError as error:
            if error.errno == errno.EINVAL:  # a filesystem that cannot
                return
            raise StoreError(
                error.errno,
                f"cannot reserve {format_bytes(nbytes)} ({format_free(str(self._path.parent))} "
                f"free): {error.strerror}",
                str(self._path),
            ) from error

    def region(self, number: int) -> RegionWriter:
        """Region `number`, to be written next; the one before is complete."""
        return RegionWriter(self, self._first[number])

    def finish(self) -> WrittenFile:
        """Writes the header, with the checksums; returns when the disk has everything.

        Raises NativeIoError, StoreError.
        """
        head, _ = self._encoded()
        self._write_bytes(head, 0)
        while self._under_way:
            self._reap()
        try:
            os.ftruncate(self._fd, self._nbytes)
            os.fsync(self._fd)
        except OSError as error:
            raise StoreError(error.errno, f"fsync: {error.strerror}", str(self._path)) from error
        return WrittenFile(self._nbytes, len(head), crc_of(head))

    def _write_bytes(self, content: bytes, offset: int) -> None:
        source = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        for begin in range(0, len(content), _BUFFER_BYTES):
            part = source[begin : begin + _BUFFER_BYTES]
            slot = self.take()
            self._views[slot][: part.numel()].copy_(part)
            self.submit(slot, part.numel(), offset + begin)

    # For RegionWriter

    def take(self) -> int:
        """A free buffer's number; waits for the oldest write if there is none."""
        while not self._free:
            self._reap()
        return self._free.pop()

    def buffer(self, slot: int) -> torch.Tensor:
        """The buffer's bytes."""
        return self._views[slot]

    def submit(self, slot: int, nbytes: int, offset: int) -> None:
        """Starts writing whole pages of a buffer to the file, and frees it when they are there."""
        whole = round_up(nbytes, PAGE_BYTES)
        self._views[slot][nbytes:whole].zero_()
        write = self._io.write(self._file, self._arena.address(slot), whole, offset)
        self._under_way.append((slot, write))

    def _reap(self) -> None:
        slot, write = self._under_way.popleft()
        write.wait()
        self._free.append(slot)

    def offset(self, entry: int) -> int:
        """Where an entry begins in the file."""
        if entry == len(self._placed):  # of a region without entries, which is the last one
            return self._nbytes
        return self._header.data_offset + self._placed[entry].begin

    def entry_nbytes(self, entry: int) -> int:
        """The bytes of an entry."""
        return self._placed[entry].end - self._placed[entry].begin

    def name(self, entry: int) -> str:
        """An entry's name."""
        return self._placed[entry].name

    def note_crc(self, entry: int, crc: int) -> None:
        """The checksum of an entry's bytes is known."""
        self._crcs[entry] = crc

    def close(self) -> None:
        """Waits for what is under way, and closes the file; idempotent."""
        for _, write in getattr(self, "_under_way", ()):
            with suppress(NativeIoError):
                write.wait()
        if hasattr(self, "_under_way"):
            self._under_way.clear()
        self._views = []
        self._resources.close()


class RegionWriter:
    """Takes the entries of a region, in order, and fills buffers with them."""

    def __init__(self, writer: DataWriter, first: int) -> None:
        self._writer = writer
        self._entry = first
        self._offset = writer.offset(first)  # of the file, where the buffer's bytes go
        self._slot = -1
        self._filled = 0

    def write(self, values: torch.Tensor) -> None:
        """The next entry's values. Raises NativeIoError if an earlier write has failed."""
        dense = values.detach().cpu().resolve_conj().resolve_neg().contiguous()
        # (A contiguous tensor of one element, or of none, may have any strides.)
        source = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
        assert source.numel() == self._writer.entry_nbytes(self._entry), self._writer.name(
            self._entry
        )
        crc, done = 0, 0
        while done < source.numel():
            if self._slot < 0:
                self._slot = self._writer.take()
            buffer = self._writer.buffer(self._slot)
            size = min(source.numel() - done, _BUFFER_BYTES - self._filled)
            part = buffer[self._filled : self._filled + size]
            part.copy_(source[done : done + size])
            crc = crc32c(part.data_ptr(), size, crc)
            self._filled += size
            done += size
            if self._filled == _BUFFER_BYTES:
                self._flush()
        self._writer.note_crc(self._entry, crc)
        self._entry += 1

    def end(self) -> None:
        """All entries were written: what the last buffer has goes to the file."""
        if self._slot < 0:
            return
        padding = -self._filled % PAGE_BYTES
        if padding:
            self._writer.note_crc(self._entry, crc_of(bytes(padding)))
        self._flush()

    def _flush(self) -> None:
        self._writer.submit(self._slot, self._filled, self._offset)
        self._offset += self._filled
        self._slot, self._filled = -1, 0
