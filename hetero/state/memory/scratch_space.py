"""The part of NVMe that one chunk group uses: extents in a scratch file, and transfers to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from hetero.config import Config
from offload._native import IoEngine, IoOp
from offload.disk.free_space import FreeSpace
from offload.disk.scratch_file import ScratchFile, Transfers, make_io_engine
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account


@dataclass
class DiskParts:
    """What a chunk group has only if something of it has, or had, its home on DISK."""

    io: IoEngine
    scratch: ScratchFile
    transfers: Transfers
    measuring: Mapping[str, int]  # the I/O engine's counters after disks were measured


class ScratchSpace:
    """Allocates extents in one scratch file, and starts transfers with it.

    The file is made at the first allocation and grows when an extent finds no free space. It never
    shrinks, so that space which was reserved once stays the engine's.
    """

    def __init__(
        self, config: Config, ledger: Ledger, notes: list[str], resources: ExitStack
    ) -> None:
        """Makes no file yet.

        `notes` are lines for the user, to which findings about the disks are appended; `resources`
        close the file, its transfers and the I/O engine.
        """
        self.parts: DiskParts | None = None
        self._config = config
        self._ledger = ledger
        self.notes = notes
        self._resources = resources.enter_context(ExitStack())
        self._free = FreeSpace()

    @property
    def is_possible(self) -> bool:
        """Whether there is or can be a file, because there are directories."""
        return bool(self._config.nvme_paths)

    def reserve(self, nbytes: int) -> None:
        """Lets the file grow until `nbytes` are free, for allocations that are to follow.

        Raises BudgetError, StoreError or NativeIoError if there is no room; nothing is changed.
        """
        missing = nbytes - self._free.nbytes
        if missing <= 0:
            return
        if self.parts is None:
            self.parts = self._open(missing)
            self._free.give(0, missing)
        else:
            self._free.give(self.parts.scratch.reserve(missing), missing)

    def allocate(self, nbytes: int) -> int:
        """Allocates `nbytes`, whole pages; returns their offset. Raises as reserve()."""
        if self.parts is None:
            self.reserve(nbytes)
        assert self.parts is not None
        offset = self._free.take(nbytes)
        return self.parts.scratch.reserve(nbytes) if offset is None else offset

    def free(self, offset: int, nbytes: int) -> None:
        """Frees what allocate() gave, whole or in part, for other extents."""
        self._free.give(offset, nbytes)

    def _open(self, nbytes: int) -> DiskParts:
        with ExitStack() as resources:
            io, io_notes = make_io_engine(self._config.io_engine, len(self._config.nvme_paths))
            resources.callback(io.close)
            scratch = ScratchFile(self._config.nvme_paths, self._ledger, Account.FILE)
            resources.callback(scratch.close)
            scratch.balance(io, nbytes)
            measuring = io.stats
            scratch.reserve(nbytes)
            transfers = Transfers(io, scratch)
            resources.callback(transfers.close)
            self.note((*scratch.notes, *io_notes))
            self._resources.push(resources.pop_all())
        return DiskParts(io, scratch, transfers, measuring)

    def note(self, lines: Iterable[str]) -> None:
        """Appends lines to the notes for the user that are not there yet."""
        self.notes.extend(line for line in lines if line not in self.notes)

    @property
    def _transfers(self) -> Transfers:
        assert self.parts is not None, "nothing is on DISK"
        return self.parts.transfers

    def read(self, address: int, nbytes: int, offset: int) -> IoOp:
        """Starts reading file bytes [offset, offset + nbytes) to `address`."""
        return self._transfers.read(address, nbytes, offset)

    def write(self, address: int, nbytes: int, offset: int) -> IoOp:
        """Starts writing `nbytes` at `address` to the file at `offset`."""
        return self._transfers.write(address, nbytes, offset)
