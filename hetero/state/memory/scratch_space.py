"""The part of NVMe that one chunk group uses: extents in a scratch file, and transfers to them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hetero.config import Config
from offload._native import IoEngine, IoOp
from offload.disk.scratch_file import ScratchFile, Transfers, checksum_bytes, make_io_engine
from offload.memory.ledger import Ledger
from offload.memory.run_pool import FreeSpace
from offload.memory.tiers import Account, Tier

FOLDER = "hetero-state"  # in each directory of nvme_path
LOCK_NAME = "lock"
SET_NAMES = ("set-0", "set-1")
COPIES = (0, 1)  # of a commit record
_NAME = re.compile(r"(\d{6,})-rank-(\d{4,})-of-(\d{4,})[-.].*", re.ASCII)
_RECORD = re.compile(r"(\d{6,})-rank-(\d{4,})-of-(\d{4,})\.commit-[01]", re.ASCII)


@dataclass(frozen=True)
class StateFiles:
    """The files of one rank: data files, one a chunk group, and those of the commit records.

    A data file has a member of the same name in each folder; records are in the first one. Each
    start of a training makes files of its own, with the next `generation` in their names; those of
    the start before go when the new ones have a commit.

    Attributes:
        folders: one in each directory of nvme_path, by their places in the set (StateSet).
        generation: from 1.
        rank: this rank's number among all `ranks` of the training.
    """

    folders: tuple[str, ...]
    generation: int
    rank: int
    ranks: int

    @property
    def prefix(self) -> str:
        """What the names of all these files begin with."""
        return f"{self.generation:06}-rank-{self.rank:04}-of-{self.ranks:04}"

    def data_name(self, chunk_group: int) -> str:
        """The name of the data file of a chunk group."""
        return f"{self.prefix}-group-{chunk_group:03}.data"

    def record_path(self, copy: int) -> Path:
        """Where one of the two COPIES of the last commit's record is."""
        return Path(self.folders[0]) / f"{self.prefix}.commit-{copy}"


def is_state_file(name: str) -> bool:
    """Whether a start has made a file of this name."""
    return _NAME.fullmatch(name) is not None


def is_record(name: str) -> bool:
    """Whether a file of this name has a commit record."""
    return _RECORD.fullmatch(name) is not None


def numbers_of(name: str) -> tuple[int, int, int] | None:
    """Generation, rank and ranks in the name of a file of a start; None of other names."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]))


@dataclass
class DiskParts:
    """What a chunk group has only if something of it has, or had, its home on DISK."""

    io: IoEngine
    scratch: ScratchFile
    transfers: Transfers


class ScratchSpace:
    """Allocates extents in one scratch file, and starts transfers with it.

    The file is made at the first allocation and grows when an extent finds no free space. It never
    shrinks, so that space which was reserved once stays the engine's.

    The file of a durable state has a name, and checksums of its pages. What is freed there may be
    the last commit's: it is free for other extents when take_freed() and reuse() have said so.
    """

    account = Account.FILE

    def __init__(
        self,
        config: Config,
        ledger: Ledger,
        notes: list[str],
        resources: ExitStack,
        state_files: StateFiles | None = None,
        number: int = 0,
    ) -> None:
        """Makes no file yet.

        Args:
            config: has the directories.
            ledger: charged for the file.
            notes: lines for the user, to which findings about the disks are appended.
            resources: close the file, its transfers and the I/O engine.
            state_files: of a durable state, the folders and names of its files.
            number: of the chunk group, by which its file is known among those.
        """
        self.parts: DiskParts | None = None
        self._config = config
        self._ledger = ledger
        self.notes = notes
        self._resources = resources.enter_context(ExitStack())
        self._free = FreeSpace()
        self._state_files = state_files
        self._number = number
        self._freed: list[tuple[int, int]] = []  # what the last commit may have
        # What is read is compared with checksums, which the budgets have in them.
        self._is_checked = self._counts_checksums = config.has_checksums
        self.checksum_bytes = 0  # of RAM, that the ledger has been charged for

    @property
    def is_durable(self) -> bool:
        """Whether the file is of a durable state."""
        return self._state_files is not None

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
            self._free.give(self._grow(self.parts, missing), missing)

    def allocate(self, nbytes: int) -> int:
        """Allocates `nbytes`, whole pages; returns their offset. Raises as reserve()."""
        if self.parts is None:
            self.reserve(nbytes)
        assert self.parts is not None
        offset = self._free.take(nbytes)
        return self._grow(self.parts, nbytes) if offset is None else offset

    def _grow(self, parts: DiskParts, nbytes: int) -> int:
        """Makes the file, and the table of its checksums, longer; returns where it did end."""
        with ExitStack() as undone:
            undone.callback(self._charge_checksums(parts.scratch.nbytes + nbytes))
            offset = parts.scratch.reserve(nbytes)
            undone.pop_all()
        if self._counts_checksums:
            parts.io.reserve_checksums(parts.transfers.file, parts.scratch.nbytes)
        return offset

    def _charge_checksums(self, file_bytes: int) -> Callable[[], None]:
        """Charges the RAM of the checksums of a file that becomes so long; returns what undoes it.

        Raises BudgetError.
        """
        before = self.checksum_bytes
        more = max(0, checksum_bytes(file_bytes) - before) if self._counts_checksums else 0
        self._ledger.charge(Tier.HOST, Account.FILE, more)
        self.checksum_bytes += more

        def undo() -> None:
            self._ledger.release(Tier.HOST, Account.FILE, self.checksum_bytes - before)
            self.checksum_bytes = before

        return undo

    def free(self, offset: int, nbytes: int) -> None:
        """Frees what allocate() gave, whole or in part, for other extents."""
        if self._state_files is None:
            self._free.give(offset, nbytes)
        else:
            self._freed.append((offset, nbytes))

    def take_freed(self) -> list[tuple[int, int]]:
        """What was freed since the last call: the commit that begins now does not have it."""
        taken, self._freed = self._freed, []
        return taken

    def reuse(self, freed: Iterable[tuple[int, int]]) -> None:
        """What take_freed() gave is free for other extents: the commit is durable."""
        for offset, nbytes in freed:
            self._free.give(offset, nbytes)

    def name(self, offset: int, nbytes: int, what: str) -> None:
        """Errors of transfers in this part of the file say `what` it has."""
        if self.parts is not None:
            self.parts.io.name_range(self.parts.transfers.file, offset, nbytes, what)

    def _open(self, nbytes: int) -> DiskParts:
        with ExitStack() as resources:
            io, io_notes = self._open_io(resources)
            directories: Sequence[str] = self._config.nvme_paths
            name: str | None = None
            if self._state_files is not None:
                directories = self._state_files.folders
                name = self._state_files.data_name(self._number)
            scratch = ScratchFile(directories, self._ledger, self.account, name)
            resources.callback(scratch.close)
            scratch.deal(nbytes)
            resources.callback(self._charge_checksums(nbytes))
            scratch.reserve(nbytes)
            transfers = Transfers(io, scratch, self._is_checked)
            resources.callback(transfers.close)
            if self._counts_checksums:
                io.reserve_checksums(transfers.file, scratch.nbytes)
            self.note((*scratch.notes, *io_notes))
            self._resources.push(resources.pop_all())
        return DiskParts(io, scratch, transfers)

    def _open_io(self, resources: ExitStack) -> tuple[IoEngine, Sequence[str]]:
        """An I/O engine, which `resources` close, and notes on it."""
        config = self._config
        io, notes = make_io_engine(config.debugging.io_engine, len(config.nvme_paths))
        resources.callback(io.close)
        return io, notes

    def note(self, lines: Iterable[str]) -> None:
        """Appends lines to the notes for the user that are not there yet."""
        self.notes.extend(line for line in lines if line not in self.notes)

    @property
    def _transfers(self) -> Transfers:
        assert self.parts is not None, "nothing is on DISK"
        return self.parts.transfers

    def read(self, address: int, nbytes: int, offset: int, soon: bool = False) -> IoOp:
        """Starts reading file bytes [offset, offset + nbytes) to `address`.

        `soon`: nobody waits for it yet.
        """
        return self._transfers.read(address, nbytes, offset, soon)

    def write(self, address: int, nbytes: int, offset: int, soon: bool = False) -> IoOp:
        """Starts writing `nbytes` at `address` to the file at `offset`; `soon` as for read()."""
        return self._transfers.write(address, nbytes, offset, soon)
