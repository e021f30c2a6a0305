"""Activations in slots of RAM, on their way to the file and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch

from hetero.activations.activation import (
    Activation,
    ActivationState,
    FileTransfer,
    SavingOrder,
    SlotCopy,
)
from hetero.config import Config
from offload import timeline
from offload._native import IoEngine
from offload.disk.scratch_file import ScratchFile, Transfers, make_io_engine
from offload.errors import BudgetError, StoreError
from offload.memory.ledger import Ledger
from offload.memory.operation import Transfer, wait_quietly
from offload.memory.run_pool import FreeSpace, RunPool
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
        stats = self._own_io.stats
        return stats["read_bytes"], stats["written_bytes"]

    @property
    def own_io_s(self) -> float:
        """Seconds for which that engine was busy."""
        if self._own_io is None:
            return 0.0
        return float(self._own_io.stats["busy_s"])

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
            scratch.deal(nbytes)
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


class Endings:
    """Transfers that nobody needs any more, and what is free when each has ended."""

    def __init__(self) -> None:
        self._under_way: list[tuple[Transfer, Callable[[], object]]] = []

    def add(self, op: Transfer, free: Callable[[], object]) -> None:
        """Calls `free` when `op` has ended, however it ends."""
        self._under_way.append((op, free))

    def settle(self) -> None:
        """Frees what transfers had that have ended."""
        for ending in list(self._under_way):
            if ending[0].done():
                self._end(ending)

    def wait_for_one(self) -> bool:
        """Waits for the oldest one; False if there is none."""
        if self._under_way:
            self._end(self._under_way[0])
            return True
        return False

    def finish(self) -> None:
        """Waits for all of them."""
        while self.wait_for_one():
            pass

    def _end(self, ending: tuple[Transfer, Callable[[], object]]) -> None:
        self._under_way.remove(ending)
        wait_quietly(ending[0])
        ending[1]()


def is_unused(copy: SlotCopy[Any], pool: RunPool) -> bool:
    """Whether its slots may get other bytes, as far as tensors and transfers are concerned."""
    if copy.handed_out is not None:
        return not copy.handed_out.is_in_use
    return not pool.is_pinned(copy.run)


class RamCopies:
    """The activations IN_RAM, WRITING, CLEAN, READING or ON_DISK.

    What is in slots alone is written in the order of saving: the earliest is needed last. What the
    file has, too, gives up its slots when they are needed, the earliest first. No call changes
    where an activation's bytes are before other bytes are there: after a failed write it is IN_RAM,
    after a failed read ON_DISK.
    """

    def __init__(
        self,
        pool: RunPool,
        room: Callable[[], int],
        file: ActivationFile | None,
        unwritten_bytes: int,
        wait_for_user: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            pool: the slots.
            room: the bytes that slots may take, at the time.
            file: None without NVMe: then nothing leaves RAM.
            unwritten_bytes: what may be in slots alone before the earliest of it is written.
            wait_for_user: waits until something has read slots that pins them; False if nothing
                does, or will have.
        """
        self.pool = pool
        self.file = file
        self.endings = Endings()
        self._room = room
        self._may_be_unwritten = unwritten_bytes
        self._wait_for_user = wait_for_user
        self._unwritten = SavingOrder()  # IN_RAM
        self._unwritten_bytes = 0
        self._writing: deque[Activation] = deque()
        self._reading: dict[Activation, None] = {}  # ahead: nobody waits for these
        self._clean = SavingOrder()

    def _copy(self, activation: Activation) -> SlotCopy[FileTransfer]:
        """The copy of one that has slots."""
        assert activation.in_ram is not None
        return activation.in_ram

    def _op(self, activation: Activation) -> FileTransfer:
        """The transfer of one that is WRITING or READING."""
        op = self._copy(activation).op
        assert op is not None
        return op

    # Room

    def take_room(self, activation: Activation, must: bool = True) -> bool:
        """Gives it slots for its `span`; False if there is no room.

        Demand (`must`) waits for writes, and takes the place of what the file has. Read-ahead takes
        only the place of what backward needs later, and leaves as much room again. Raises
        NativeIoError if a write failed that was to make room.
        """
        slots = self.pool.slots_for(activation.span)
        nbytes = slots * self.pool.arena.slot_bytes
        while True:
            self.settle()
            if must or self.pool.used_bytes + 2 * nbytes <= self._room():
                run = self.pool.take(slots)
                if run is not None:
                    activation.in_ram = SlotCopy(run)
                    return True
            before = None if must else activation
            if not self._give_up_clean(before) and not (must and self._wait_for_room()):
                return False

    def shrink_to(self, nbytes: int) -> bool:
        """Slots are to take at most `nbytes`; whether they do. Raises as take_room()."""
        while not self.pool.shrink(nbytes):
            self.settle()
            if not self._give_up_clean(None) and not self._wait_for_room():
                return self.pool.shrink(nbytes)
        return True

    def _give_up_clean(self, before: Activation | None) -> bool:
        """The earliest activation that is CLEAN, and was saved before that one, is ON_DISK."""
        activation = self._clean.take(lambda each: is_unused(self._copy(each), self.pool), before)
        if activation is None:
            return False
        self.give_back(activation)
        activation.state = ActivationState.ON_DISK
        return True

    def give_back(self, activation: Activation) -> None:
        """Its slots are free, once nothing uses them."""
        run, activation.in_ram = self._copy(activation).run, None
        self.pool.give_back(run)

    def _wait_for_room(self) -> bool:
        """Waits for what uses slots and is not needed: transfers that were cancelled, a device that
        reads, what is read ahead and needed last, which is cancelled; else for the oldest write,
        which is started if there is none. False if none can be.
        """
        if self.endings.wait_for_one() or self._wait_for_user():
            return True
        if self._reading:
            last = min(self._reading, key=lambda each: each.number)
            self._op(last).cancel()
            with suppress(OSError):
                self.finish_reading(last)
            return True
        if not self._writing and not self._write_next():
            return False
        self._op(self._writing[0]).hurry()
        with timeline.span("activation"):
            self._finish_write()
        return True

    # To the file

    def filled(self, activation: Activation) -> None:
        """Its slots have its bytes, and nothing else has. Starts the writes that are due.

        Raises BudgetError, StoreError or NativeIoError if one cannot be started.
        """
        self._note_unwritten(activation)
        while self._unwritten_bytes > self._may_be_unwritten and self._write_next():
            pass

    def _note_unwritten(self, activation: Activation) -> None:
        activation.state = ActivationState.IN_RAM
        self._unwritten.add(activation)
        self._unwritten_bytes += self._slot_bytes(activation)

    def _slot_bytes(self, activation: Activation) -> int:
        return self._copy(activation).run.slots * self.pool.arena.slot_bytes

    def _write_next(self) -> bool:
        """Starts writing the earliest activation that is IN_RAM alone; False if there is none."""
        if self.file is None or not self._unwritten:
            return False
        activation = next(iter(self._unwritten))
        copy, nbytes = self._copy(activation), _pages(activation)
        if activation.extent is None:
            activation.extent = self.file.take(nbytes, activation.words)
        copy.op = self.file.write(self.pool.address(copy.run), nbytes, activation.extent)
        self._unwritten.discard(activation)
        self._unwritten_bytes -= self._slot_bytes(activation)
        activation.state = ActivationState.WRITING
        self._writing.append(activation)
        return True

    def _finish_write(self) -> None:
        """Waits until the oldest is written. Raises NativeIoError; then it is IN_RAM."""
        activation = self._writing.popleft()
        try:
            self._end_transfer(activation)
        except BaseException:
            self._note_unwritten(activation)
            raise

    def _end_transfer(self, activation: Activation) -> None:
        """Waits for its transfer, after which it is CLEAN. Raises NativeIoError."""
        op, self._copy(activation).op = self._op(activation), None
        op.wait()
        activation.state = ActivationState.CLEAN
        self._clean.add(activation)

    # From the file

    def begin_reading(self, activation: Activation, must: bool) -> bool:
        """Starts reading it, which is ON_DISK, into slots; False if there is no room.

        Raises NativeIoError if it cannot be started, or as take_room().
        """
        assert self.file is not None
        assert activation.extent is not None
        if not self.take_room(activation, must):
            return False
        copy = self._copy(activation)
        address = self.pool.address(copy.run)
        try:
            copy.op = self.file.read(address, _pages(activation), activation.extent, soon=not must)
        except BaseException:
            self.give_back(activation)
            raise
        activation.state = ActivationState.READING
        if not must:
            self._reading[activation] = None
        return True

    def await_read(self, activation: Activation) -> None:
        """Somebody waits for one that is READING, and calls finish_reading()."""
        self._reading.pop(activation, None)
        self._op(activation).hurry()

    def finish_reading(self, activation: Activation) -> None:
        """Waits until it is read. Raises NativeIoError; then it is ON_DISK."""
        self._reading.pop(activation, None)
        try:
            self._end_transfer(activation)
        except BaseException:
            activation.state = ActivationState.ON_DISK
            self.give_back(activation)
            raise

    def view(self, activation: Activation) -> torch.Tensor:
        """The bytes in its slots, flat: a pin."""
        return self.pool.view(self._copy(activation).run, activation.span)

    # Ends

    def settle(self) -> None:
        """Takes account of transfers that are done.

        Of one that failed nobody is told: what is still to be written is written again, and what
        could not be read is read again, when somebody needs that, who then is told.
        """
        while self._writing and self._op(self._writing[0]).done():
            with suppress(OSError):
                self._finish_write()
        for activation in [each for each in self._reading if self._op(each).done()]:
            with suppress(OSError):
                self.finish_reading(activation)
        self.endings.settle()

    def drop(self, activation: Activation) -> None:
        """No graph needs it: its slots and its place in the file are free, once nothing uses them.

        A transfer under way is cancelled.
        """
        state, activation.state = activation.state, ActivationState.GONE
        copy, activation.in_ram = activation.in_ram, None
        extent, activation.extent = activation.extent, None
        self._clean.discard(activation)
        self._reading.pop(activation, None)

        def free() -> None:
            if copy is not None:
                copy.handed_out = None  # which is a pin
                self.pool.give_back(copy.run)
            if extent is not None:
                assert self.file is not None
                self.file.give_back(extent, _pages(activation))

        if state is ActivationState.IN_RAM:
            assert copy is not None
            self._unwritten.discard(activation)
            self._unwritten_bytes -= copy.run.slots * self.pool.arena.slot_bytes
        elif state is ActivationState.WRITING:
            self._writing.remove(activation)
        if copy is None or copy.op is None:
            free()
        else:
            copy.op.cancel()
            self.endings.add(copy.op, free)

    def transfers(self) -> list[Transfer]:
        """Those under way that somebody needs."""
        return [self._op(each) for each in (*self._writing, *self._reading)]

    def finish(self) -> None:
        """Waits until no transfer is under way, however each ends."""
        for op in self.transfers():
            op.cancel()
            wait_quietly(op)
        self.endings.finish()
        self.settle()


def _pages(activation: Activation) -> int:
    return round_up(activation.span, PAGE_BYTES)
