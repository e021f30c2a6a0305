"""Writes one data file of a checkpoint: safetensors, past the page cache, with a checksum each."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from hetero.checkpoint.safetensors_header import Header, encode
from hetero.checkpoint.schema import crc_of
from offload._native import IoOp, NativeIoError, crc32c
from offload.disk.directories import format_free
from offload.disk.file_member import open_direct
from offload.disk.scratch_file import make_io_engine
from offload.errors import StoreError
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.sizes import PAGE_BYTES, format_bytes, round_up
from offload.memory.tiers import Account, Tier

CHECKSUMS = "crc32c"  # the header's metadata: eight hexadecimal digits per entry, in file order
PADDING = "padding@"  # entries that only make the next one begin at a page
Range = tuple[str, int, int]  # elements [begin, end) of the flat tensor of a key
_BUFFER_BYTES = 4 << 20
_BUFFERS = 4


@dataclass(frozen=True)
class WrittenFile:
    """What a checkpoint's manifest says of a data file."""

    nbytes: int
    header_nbytes: int
    header_crc32c: int


class DataWriter:
    """A new data file, whose regions are written by one thread through a few MiB of buffers.

    Its space is allocated at once, so that a full disk is an error before anything is written.
    finish() makes it durable; without it close() leaves the file as it is.
    """

    def __init__(
        self,
        path: Path,
        regions: Sequence[Sequence[Range]],
        dtypes: Mapping[str, torch.dtype],
        io_engine: str,
    ) -> None:
        """Raises StoreError if the file cannot be made.

        Args:
            path: the file.
            regions: the ranges of tensors that are written one after the other; regions are written
                in any order, because each begins at a page.
            dtypes: by key.
            io_engine: as in Config.
        """
        self._path = path
        self._entries: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
        self._crcs: dict[str, int] = {}  # by entry, in the order of the file
        for number, ranges in enumerate(regions):
            nbytes = 0
            for key, begin, end in ranges:
                self._add(f"{key}@{begin}", dtypes[key], end - begin, 0)
                nbytes += (end - begin) * dtypes[key].itemsize
            padding = -nbytes % PAGE_BYTES
            if padding:
                self._add(f"{PADDING}{number}", torch.uint8, padding, crc_of(bytes(padding)))
        _, self._header = self._encoded()
        self._slot, self._filled, self._offset = -1, 0, self._header.data_offset
        self._under_way: deque[tuple[int, IoOp]] = deque()
        self._views: list[torch.Tensor] = []
        self._resources = ExitStack()
        try:
            self._open(io_engine)
        except BaseException:
            self.close()
            raise

    def _add(self, name: str, dtype: torch.dtype, numel: int, crc: int) -> None:
        self._entries.append((name, dtype, (numel,)))
        self._crcs[name] = crc

    def _encoded(self) -> tuple[bytes, Header]:
        checksums = "".join(f"{crc:08x}" for crc in self._crcs.values())
        return encode(self._entries, {CHECKSUMS: checksums}, alignment=PAGE_BYTES)

    def _open(self, io_engine: str) -> None:
        try:
            self._fd, _ = open_direct(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except OSError as error:
            text = f"cannot open it: {error.strerror}"
            raise StoreError(error.errno, text, str(self._path)) from error
        self._resources.callback(os.close, self._fd)
        self._allocate()
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
        self._free = list(range(_BUFFERS))

    def _allocate(self) -> None:
        nbytes = round_up(self._header.file_bytes, PAGE_BYTES)
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

    def write(self, key: str, begin: int, values: torch.Tensor) -> None:
        """Writes the range of `key` that begins there. Those of a region come in its order.

        Raises NativeIoError.
        """
        placed = self._header.entries[f"{key}@{begin}"]
        dense = values.detach().cpu().resolve_conj().resolve_neg().contiguous()
        # (A contiguous tensor of one element, or of none, may have any strides.)
        source = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
        assert source.numel() == placed.end - placed.begin, placed.name
        self._go_to(self._header.data_offset + placed.begin)
        self._crcs[placed.name] = self._append(source)

    def _go_to(self, offset: int) -> None:
        """What is written next goes to byte `offset` of the file, where a region begins."""
        if offset != self._offset + self._filled:
            if self._filled:
                self._flush()
            assert offset % PAGE_BYTES == 0, offset
            self._offset = offset

    def _append(self, source: torch.Tensor) -> int:
        """Copies bytes to buffers, and starts writing each that is full; returns their checksum."""
        crc, done = 0, 0
        while done < source.numel():
            if self._slot < 0:
                self._slot = self._take()
            buffer = self._views[self._slot]
            size = min(source.numel() - done, _BUFFER_BYTES - self._filled)
            part = buffer[self._filled : self._filled + size]
            part.copy_(source[done : done + size])
            crc = crc32c(part.data_ptr(), size, crc)
            self._filled += size
            done += size
            if self._filled == _BUFFER_BYTES:
                self._flush()
        return crc

    def _take(self) -> int:
        """A free buffer's number; waits for the oldest write if there is none."""
        while not self._free:
            self._reap()
        return self._free.pop()

    def _flush(self) -> None:
        """Starts writing whole pages of the buffer to the file; it is free when they are there."""
        whole = round_up(self._filled, PAGE_BYTES)
        self._views[self._slot][self._filled : whole].zero_()
        address = self._arena.address(self._slot)
        write = self._io.write(self._file, address, whole, self._offset)
        self._under_way.append((self._slot, write))
        self._offset += self._filled
        self._slot, self._filled = -1, 0

    def _reap(self) -> None:
        slot, write = self._under_way.popleft()
        write.wait()
        self._free.append(slot)

    def finish(self) -> WrittenFile:
        """Writes the header, with the checksums; returns when the disk has everything.

        Raises NativeIoError, StoreError.
        """
        head, header = self._encoded()
        self._go_to(0)
        self._append(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        if self._filled:
            self._flush()
        while self._under_way:
            self._reap()
        try:
            os.ftruncate(self._fd, header.file_bytes)
            os.fsync(self._fd)
        except OSError as error:
            raise StoreError(error.errno, f"fsync: {error.strerror}", str(self._path)) from error
        return WrittenFile(header.file_bytes, len(head), crc_of(head))

    def close(self) -> None:
        """Waits for what is under way, and closes the file; idempotent."""
        while self._under_way:
            with suppress(NativeIoError):
                self._under_way.popleft()[1].wait()
        self._views = []
        self._resources.close()
