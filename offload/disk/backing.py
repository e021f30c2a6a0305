"""Where the chunks in a cache's slots come from and go to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from offload.memory.arena import HostArena


class Operation(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Blocks until complete; raises an OSError if it failed."""

    def cancel(self) -> None:
        """Nobody wants it any more: it may stop early; wait() is called nevertheless."""


class Backing(Protocol):
    """Moves a chunk between its home and slots of an arena."""

    def read(self, chunk: int, slot: int) -> Operation:
        """Starts filling the slots from `slot` on."""

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
        """Starts writing from `address`, likewise."""


class FileBacking:
    """Chunks whose home is in the file."""

    def __init__(
        self, arena: HostArena, transfers: FileTransfers, extents: Mapping[int, Extent]
    ) -> None:
        self._arena = arena
        self._transfers = transfers
        self._extents = extents

    def read(self, chunk: int, slot: int) -> Operation:
        """Starts a read. Raises NativeIoError if it cannot be started."""
        extent = self._extents[chunk]
        return self._transfers.read(self._arena.address(slot), extent.nbytes, extent.offset)

    def write(self, chunk: int, slot: int) -> Operation:
        """Starts a write, likewise."""
        extent = self._extents[chunk]
        return self._transfers.write(self._arena.address(slot), extent.nbytes, extent.offset)
