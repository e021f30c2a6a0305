"""Where the chunks in a cache's slots come from and go to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from offload.memory.arena import HostArena
from offload.memory.operation import Operation


class Backing(Protocol):
    """Moves a chunk between its home and slots of an arena."""

    def read(self, chunk: int, slot: int) -> Operation:
        """Starts filling the slots from `slot` on."""


class WritableBacking(Backing, Protocol):
    """A Backing of chunks that may change in their slots."""

    def write(self, chunk: int, slot: int) -> Operation:
        """Starts taking the slots' bytes home."""


@dataclass(frozen=True)
class Extent:
    """Where a chunk's kind of state lies in the file."""

    offset: int  # bytes
    nbytes: int  # transferred; at most run * slot_bytes
    run: int  # consecutive slots it takes


class FileTransfers(Protocol):
    """Asynchronous transfers of one file; addresses, sizes and offsets are whole pages."""

    def read(self, address: int, nbytes: int, offset: int) -> Operation:
        """Starts reading to `address`. Raises NativeIoError if it cannot be started."""

    def write(self, address: int, nbytes: int, offset: int) -> Operation:
        """Starts writing from `address`. Raises NativeIoError if it cannot be started."""


class FileBacking:
    """Chunks whose home is in the file."""

    def __init__(
        self,
        arena: HostArena,
        transfers: FileTransfers,
        extents: Mapping[int, Extent],
        before_read: Callable[[int], object] | None = None,
        before_write: Callable[[int], object] | None = None,
    ) -> None:
        """
        Args:
            arena: Has the slots.
            transfers: Those of the file.
            extents: Where the chunks are in the file, by chunk.
            before_read: Called with a chunk before it is read: waits until the file has what it is
                to have. What it raises, read() raises.
            before_write: Likewise, before the bytes of its slots are written.
        """
        self._arena = arena
        self._transfers = transfers
        self._extents = extents
        self._before_read = before_read
        self._before_write = before_write

    def read(self, chunk: int, slot: int) -> Operation:
        """Starts a read. Raises NativeIoError if it cannot be started."""
        if self._before_read is not None:
            self._before_read(chunk)
        extent = self._extents[chunk]
        return self._transfers.read(self._arena.address(slot), extent.nbytes, extent.offset)

    def write(self, chunk: int, slot: int) -> Operation:
        """Starts a write. Raises NativeIoError if it cannot be started."""
        if self._before_write is not None:
            self._before_write(chunk)
        extent = self._extents[chunk]
        return self._transfers.write(self._arena.address(slot), extent.nbytes, extent.offset)
