"""The part of NVMe that activations use: a scratch file of their own in the same directories."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from hetero.activations.activation import FileTransfer
from hetero.config import Config
from offload._native import IoEngine
from offload.disk.scratch_file import ScratchFile, Transfers, make_io_engine
from offload.errors import BudgetError, StoreError
from offload.memory.free_space import FreeSpace
from offload.memory.ledger import Ledger
from offload.memory.sizes import PAGE_BYTES, round_up
from offload.memory.tiers import Account

_GROWTH = 4  # the file grows by a part of so many of what it has, at least


class ActivationFile:
    """Extents in a scratch file, and transfers that take their turn among model state's.

    Reads that backward waits for go first, with the parameters'. Reads ahead, and writes, come
    after these and before the step pipeline's transfers; whoever comes to wait for one hurries it.
    The file is made at the first extent, and grows. The calling thread keeps others away.
    """

    def __init__(
        self,
        config: Config,
        ledger: Ledger,
        notes: list[str],
        model_state_io: Callable[[], IoEngine | None],
    ) -> None:
        """
        Args:
            config: has the directories.
            ledger: charged for the file.
            notes: lines for the user, to append to.
            model_state_io: the I/O engine that model state uses, which lives longer; None: it has
                none, and this makes one of its own.
        """
        self._config = config
        self._ledger = ledger
        self._notes = notes
        self._model_state_io = model_state_io
        self._free = FreeSpace()
        self._scratch: ScratchFile | None = None
        self._transfers: Transfers | None = None
        self._resources = ExitStack()
        self._own_io: IoEngine | None = None
        self._measuring: Mapping[str, int] = {}
        self.written_bytes = 0  # asked for
        self.read_bytes = 0

    @property
    def transfers(self) -> Transfers:
        """Those of the file, which take() has made."""
        assert self._transfers is not None
        return self._transfers

    @property
    def own_io_bytes(self) -> tuple[int, int]:
        """Bytes read and written by an I/O engine that nothing else uses; 0 if there is none."""
        if self._own_io is None:
            return 0, 0
        now, before = self._own_io.stats, self._measuring
        read, written = (now[n] - before[n] for n in ("read_bytes", "written_bytes"))
        return read, written

    @property
    def own_io_s(self) -> float:
        """Seconds for which that engine was busy."""
        if self._own_io is None:
            return 0.0
        return float(self._own_io.stats["busy_s"] - self._measuring["busy_s"])

    def take(self, nbytes: int, what: str) -> int:
        """Allocates `nbytes`, whole pages; returns their offset.

        Errors of transfers there say `what` it has. Raises BudgetError or StoreError if there is no
        room.
        """
        offset = self._free.take(nbytes)
        if offset is None:
            self._grow(nbytes)
            offset = self._free.take(nbytes)
            assert offset is not None
        self.transfers.engine.name_range(self.transfers.file, offset, nbytes, what)
        return offset

    def give_back(self, offset: int, nbytes: int) -> None:
        """Frees what take() allocated; no transfer to it or from it is under way."""
        self._free.give(offset, nbytes)

    def write(self, address: int, nbytes: int, offset: int) -> FileTransfer:
        """Starts writing. Raises NativeIoError if it cannot be started."""
        op = self.transfers.write(address, nbytes, offset, soon=True)
        self.written_bytes += nbytes
        return op

    def read(self, address: int, nbytes: int, offset: int, soon: bool) -> FileTransfer:
        """Starts reading; `soon`: nobody waits for it yet. Raises NativeIoError."""
        op = self.transfers.read(address, nbytes, offset, soon)
        self.read_bytes += nbytes
        return op

    def _grow(self, nbytes: int) -> None:
        if self._scratch is None:
            self._open(nbytes)
        assert self._scratch is not None
        more = max(nbytes, round_up(self._scratch.nbytes // _GROWTH, PAGE_BYTES))
        try:
            begin = self._scratch.reserve(more)
        except (BudgetError, StoreError):
            if more == nbytes:
                raise
            more = nbytes  # there may be room for just that
            begin = self._scratch.reserve(more)
        self._free.give(begin, more)

    def _open(self, nbytes: int) -> None:
        with ExitStack() as resources:
            io = self._model_state_io()
            io_notes: Sequence[str] = ()
            if io is None:
                directories = len(self._config.nvme_paths)
                io, io_notes = make_io_engine(self._config.debugging.io_engine, directories)
                resources.callback(io.close)
                self._own_io = io
            scratch = ScratchFile(self._config.nvme_paths, self._ledger, Account.ACTIVATION)
            resources.callback(scratch.close)
            scratch.balance(io, nbytes)
            self._measuring = io.stats
            self._transfers = Transfers(io, scratch, self._config.verify_reads)
            resources.callback(self._transfers.close)
            lines = (*scratch.notes, *io_notes)
            self._notes += [line for line in lines if line not in self._notes]
            self._scratch = scratch
            self._resources = resources.pop_all()

    def close(self) -> None:
        """Waits for transfers under way and frees the space; idempotent."""
        self._resources.close()
        self._scratch = self._transfers = None
