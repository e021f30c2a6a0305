"""The file of a chunk group's DISK homes, made when something is to be stored there."""

from __future__ import annotations

from collections.abc import Mapping
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
    """What exists only if something is homed on DISK."""

    io: IoEngine
    scratch: ScratchFile
    transfers: Transfers
    measuring: Mapping[str, int]  # the I/O engine's counters after disks were measured


class ScratchSpace:
    """Extents in one scratch file, and transfers with them.

    The file grows when an extent finds no free space; it never shrinks, so that space which was
    reserved once stays the engine's.
    """

    def __init__(
        self, config: Config, ledger: Ledger, notes: list[str], resources: ExitStack
    ) -> None:
        """`resources` close it; what is to be known of the disks is appended to `notes`."""
        self.parts: DiskParts | None = None
        self._config = config
        self._ledger = ledger
        self._notes = notes
        self._resources = resources.enter_context(ExitStack())
        self._free = FreeSpace()

    @property
    def is_possible(self) -> bool:
        """Whether there is, or may be, a file: there are directories."""
        return bool(self._config.nvme_paths)

    def make_room(self, nbytes: int) -> None:
        """Takes care that `nbytes` are free, at once what take() would take tile by tile.

        Raises BudgetError, StoreError or NativeIoError, with nothing changed.
        """
        missing = nbytes - self._free.nbytes
        if missing <= 0:
            return
        if self.parts is None:
            self.parts = self._open(missing)
            self._free.give(0, missing)
        else:
            self._free.give(self.parts.scratch.reserve(missing), missing)

    def take(self, nbytes: int) -> int:
        """The offset of `nbytes`, a multiple of the page, of allocated space. Raises likewise."""
        if self.parts is None:
            self.make_room(nbytes)
        assert self.parts is not None
        offset = self._free.take(nbytes)
        return self.parts.scratch.reserve(nbytes) if offset is None else offset

    def give_back(self, offset: int, nbytes: int) -> None:
        """Undoes take(), whole or in part."""
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
            notes = (*scratch.notes, *io_notes)
            self._notes.extend(n for n in notes if n not in self._notes)
            self._resources.push(resources.pop_all())
        return DiskParts(io, scratch, transfers, measuring)

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
