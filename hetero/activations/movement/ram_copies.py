"""Activations in slots of RAM, on their way to the file and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from hetero.activations.activation import Activation, ActivationState
from hetero.activations.handed_out import HandedOut
from hetero.activations.movement.activation_file import ActivationFile, FileTransfer
from hetero.activations.movement.earliest_first import EarliestFirst
from offload import timeline
from offload.memory.operation import wait_quietly
from offload.memory.run_pool import Run, RunPool
from offload.memory.sizes import PAGE_BYTES, round_up


@dataclass(frozen=True)
class _Ending:
    """A transfer that nobody needs, and what is free when it is done."""

    op: FileTransfer
    run: Run
    extent: int
    nbytes: int


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
        self._room = room
        self._file = file
        self._may_be_unwritten = unwritten_bytes
        self._wait_for_user = wait_for_user
        self._unwritten: deque[Activation] = deque()  # IN_RAM, in the order of saving
        self._unwritten_bytes = 0
        self._writing: deque[Activation] = deque()
        self._reading: dict[Activation, None] = {}  # ahead: nobody waits for these
        self._clean = EarliestFirst(self._is_unused)
        self._ending: list[_Ending] = []
        self._ops: dict[Activation, FileTransfer] = {}

    # Room

    def take_room(self, activation: Activation, must: bool = True) -> bool:
        """Gives it slots for its `span`; False if there is no room.

        What `must` have room waits for writes, and takes the place of what the file has. What need
        not takes the place only of what backward needs later, and leaves a part of the room.
        Raises NativeIoError if a write failed that was to make room.
        """
        slots = self.pool.slots_for(activation.span)
        least_left = 0 if must else slots * self.pool.arena.slot_bytes
        last = None if must else activation.number
        while True:
            self.settle()
            wanted = (slots * self.pool.arena.slot_bytes) + least_left
            run: Run | None = None
            if must or self.pool.used_bytes + wanted <= self._room():
                run = self.pool.take(slots)
            if run is not None:
                activation.run = run
                return True
            if not self._give_up_clean(last) and not (must and self._wait_for_room()):
                return False

    def shrink_to(self, nbytes: int) -> bool:
        """Slots are to take at most `nbytes`; whether they do. Raises as take_room()."""
        while not self.pool.shrink(nbytes):
            self.settle()
            if not self._give_up_clean(None) and not self._wait_for_room():
                return self.pool.shrink(nbytes)
        return True

    def _give_up_clean(self, before: int | None) -> bool:
        """The earliest activation that is CLEAN, and was saved before that number, is ON_DISK."""
        activation = self._clean.take(before)
        if activation is None:
            return False
        self._give_back_run(activation)
        activation.state = ActivationState.ON_DISK
        return True

    def _is_unused(self, activation: Activation) -> bool:
        back = activation.handed_out
        if back is not None:
            return not (back.is_viewed or back.is_changed)  # a change is to be refused
        return activation.run is not None and not self.pool.is_pinned(activation.run)

    def _wait_for_room(self) -> bool:
        """Waits for what uses slots and is not needed: transfers that were cancelled, a device that
        reads, what is read ahead and needed last, which is cancelled; else for the oldest write,
        which is started if there is none. False if none can be.
        """
        if self._ending:
            self._end(self._ending.pop(0))
            return True
        if self._wait_for_user():
            return True
        if self._reading:
            last = min(self._reading, key=lambda each: each.number)
            self._ops[last].cancel()
            with suppress(OSError):
                self.finish_reading(last)
            return True
        if not self._writing and not self._write_next():
            return False
        activation = self._writing[0]
        self._ops[activation].hurry()
        with timeline.span("activation"):
            self._finish_write(activation)
        return True

    # To the file

    def filled(self, activation: Activation) -> None:
        """Its slots have its bytes, and nothing else has. Starts the writes that are due.

        Raises BudgetError, StoreError or NativeIoError if one cannot be started.
        """
        assert activation.run is not None
        activation.state = ActivationState.IN_RAM
        self._unwritten.append(activation)
        self._unwritten_bytes += self._nbytes(activation.run)
        while self._unwritten_bytes > self._may_be_unwritten and self._write_next():
            pass

    def _write_next(self) -> bool:
        """Starts writing the earliest activation that is IN_RAM alone; False if there is none."""
        while self._file is not None and self._unwritten:
            activation = self._unwritten[0]
            if activation.state is ActivationState.IN_RAM:
                self._write(activation, self._file)
                return True
            self._unwritten.popleft()
        return False

    def _write(self, activation: Activation, file: ActivationFile) -> None:
        assert activation.run is not None
        nbytes = _pages(activation)
        if activation.extent is None:
            activation.extent = file.take(nbytes, activation.words)
        op = file.write(self.pool.address(activation.run), nbytes, activation.extent)
        self._unwritten.popleft()
        self._unwritten_bytes -= self._nbytes(activation.run)
        activation.state = ActivationState.WRITING
        self._ops[activation] = op
        self._writing.append(activation)

    def _finish_write(self, activation: Activation) -> None:
        """Waits until it is written. Raises NativeIoError; then it is IN_RAM."""
        op = self._ops.pop(activation)
        self._writing.remove(activation)
        try:
            op.wait()
        except BaseException:
            assert activation.run is not None
            activation.state = ActivationState.IN_RAM
            self._unwritten.appendleft(activation)
            self._unwritten_bytes += self._nbytes(activation.run)
            raise
        self._note_clean(activation)

    def _note_clean(self, activation: Activation) -> None:
        activation.state = ActivationState.CLEAN
        self._clean.add(activation)

    # From the file

    def begin_reading(self, activation: Activation, must: bool) -> bool:
        """Starts reading it, which is ON_DISK, into slots; False if there is no room.

        Raises NativeIoError if it cannot be started, or as take_room().
        """
        assert self._file is not None
        assert activation.extent is not None
        if not self.take_room(activation, must):
            return False
        assert activation.run is not None
        address = self.pool.address(activation.run)
        try:
            op = self._file.read(address, _pages(activation), activation.extent, soon=not must)
        except BaseException:
            self._give_back_run(activation)
            raise
        activation.state = ActivationState.READING
        self._ops[activation] = op
        if not must:
            self._reading[activation] = None
        return True

    def await_read(self, activation: Activation) -> None:
        """Somebody waits for one that is READING, and calls finish_reading()."""
        self._reading.pop(activation, None)
        self._ops[activation].hurry()

    def finish_reading(self, activation: Activation) -> None:
        """Waits until it is read. Raises NativeIoError; then it is ON_DISK."""
        op = self._ops.pop(activation)
        self._reading.pop(activation, None)
        try:
            op.wait()
        except BaseException:
            activation.state = ActivationState.ON_DISK
            self._give_back_run(activation)
            raise
        self._note_clean(activation)

    def view(self, activation: Activation) -> torch.Tensor:
        """The bytes in its slots, flat: a pin."""
        assert activation.run is not None
        return self.pool.view(activation.run, activation.span)

    def hand_out(self, activation: Activation) -> HandedOut:
        """The bytes in its slots, for views that backward gets."""
        if activation.handed_out is None:
            activation.handed_out = HandedOut(self.view(activation))
        return activation.handed_out

    # Ends

    def settle(self) -> None:
        """Takes account of transfers that are done.

        Of one that failed nobody is told: what is still to be written is written again, and what
        could not be read is read again, when somebody needs that, who then is told.
        """
        while self._writing and self._ops[self._writing[0]].done():
            with suppress(OSError):
                self._finish_write(self._writing[0])
        for activation in [each for each in self._reading if self._ops[each].done()]:
            with suppress(OSError):
                self.finish_reading(activation)
        going_on = []
        for ending in self._ending:
            if ending.op.done():
                self._end(ending)
            else:
                going_on.append(ending)
        self._ending = going_on

    def _end(self, ending: _Ending) -> None:
        wait_quietly(ending.op)
        self.pool.give_back(ending.run)
        assert self._file is not None
        self._file.give_back(ending.extent, ending.nbytes)

    def drop(self, activation: Activation) -> None:
        """No graph needs it: its slots and its place in the file are free, once nothing uses them.

        A transfer under way is cancelled.
        """
        state, activation.state = activation.state, ActivationState.GONE
        self._clean.discard(activation)
        op = self._ops.pop(activation, None)
        run, extent = activation.run, activation.extent
        activation.handed_out = None
        if state is ActivationState.IN_RAM:
            assert run is not None
            self._unwritten.remove(activation)
            self._unwritten_bytes -= self._nbytes(run)
        if op is not None:
            self._reading.pop(activation, None)
            if state is ActivationState.WRITING:
                self._writing.remove(activation)
            op.cancel()
            assert run is not None
            assert extent is not None
            self._ending.append(_Ending(op, run, extent, _pages(activation)))
        else:
            if run is not None:
                self.pool.give_back(run)
            if extent is not None:
                assert self._file is not None
                self._file.give_back(extent, _pages(activation))
        activation.run = activation.extent = None

    def _give_back_run(self, activation: Activation) -> None:
        assert activation.run is not None
        activation.handed_out = None
        self.pool.give_back(activation.run)
        activation.run = None

    def _nbytes(self, run: Run) -> int:
        return run.slots * self.pool.arena.slot_bytes

    def finish(self) -> None:
        """Waits until no transfer is under way, however each ends."""
        for op in list(self._ops.values()):
            op.cancel()
            wait_quietly(op)
        for ending in self._ending:
            wait_quietly(ending.op)
        self.settle()


def _pages(activation: Activation) -> int:
    return round_up(activation.span, PAGE_BYTES)
