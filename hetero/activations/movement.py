"""How activations go away from where compute happens, and come back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch

from hetero.activations.activation import (
    Activation,
    ActivationState,
    HandedOut,
    SavingOrder,
    SlotCopy,
)
from hetero.activations.limits import ActivationLimits
from hetero.config import Config
from hetero.state.memory import DiskParts, ScratchSpace
from offload import timeline
from offload._native import IoEngine, IoOp
from offload.device.backend import Backend
from offload.errors import BudgetError, StoreError
from offload.memory.ledger import Ledger
from offload.memory.operation import Transfer, wait_quietly
from offload.memory.run_pool import RunPool
from offload.memory.sizes import PAGE_BYTES, format_bytes, round_up
from offload.memory.tiers import Account, Tier

_GROWTH = 4  # the file grows by a part of so many of what it has, at least


class ActivationFile(ScratchSpace):
    """The part of NVMe that activations use, whose transfers take their turn among model state's.

    Reads that backward waits for go first, with the parameters'. Reads ahead, and writes, come
    after these and before the step pipeline's transfers; whoever comes to wait for one hurries it.
    """

    account = Account.ACTIVATION

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
        self._end = ExitStack()
        super().__init__(config, ledger, notes, self._end)
        self._is_checked, self._counts_checksums = config.verify_reads, False
        self._model_state_io = model_state_io
        self._own_io: IoEngine | None = None
        self.written_bytes = self.read_bytes = 0  # asked for

    @property
    def own_io_stats(self) -> Mapping[str, Any]:
        """What an I/O engine that nothing else uses has counted; nothing if there is none."""
        return {} if self._own_io is None else self._own_io.stats

    def write(self, address: int, nbytes: int, offset: int, soon: bool = True) -> IoOp:
        op = super().write(address, nbytes, offset, soon)
        self.written_bytes += nbytes
        return op

    def read(self, address: int, nbytes: int, offset: int, soon: bool = False) -> IoOp:
        op = super().read(address, nbytes, offset, soon)
        self.read_bytes += nbytes
        return op

    def _grow(self, parts: DiskParts, nbytes: int) -> int:
        more = round_up(parts.scratch.nbytes // _GROWTH, PAGE_BYTES) - nbytes
        if more > 0:
            with suppress(BudgetError, StoreError):  # there may be room for just what is needed
                begin = super()._grow(parts, nbytes + more)
                self.free(begin + nbytes, more)
                return begin
        return super()._grow(parts, nbytes)

    def _open_io(self, resources: ExitStack) -> tuple[IoEngine, Sequence[str]]:
        io = self._model_state_io()
        if io is not None:
            return io, ()
        self._own_io, notes = super()._open_io(resources)
        return self._own_io, notes

    def close(self) -> None:
        """Waits for transfers under way and frees the space; idempotent."""
        self._end.close()
        self.parts = None


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

    def _copy(self, activation: Activation) -> SlotCopy[IoOp]:
        """The copy of one that has slots."""
        assert activation.in_ram is not None
        return activation.in_ram

    def _op(self, activation: Activation) -> IoOp:
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
            activation.extent = self.file.allocate(nbytes)
            self.file.name(activation.extent, nbytes, activation.words)
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
                self.file.free(extent, _pages(activation))

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


_LOOKS = 2  # at so many that others hold, for each tensor that is saved


class KeptTensors:
    """The activations whose tensors are kept, charged by the bytes of their storages.

    Backward needs them in the reverse order of saving, so the earliest leaves first: it is needed
    last. One that somebody else holds, too, does not leave, because that would free nothing, and is
    not charged: the loop's inputs, what modules have, what the running forward still uses. When the
    others have let go of it, it is charged again.
    """

    def __init__(self, ledger: Ledger, tier: Tier, may_leave: Callable[[int], bool]) -> None:
        """`tier` is where compute happens; `may_leave` says it of a number of bytes."""
        self._ledger = ledger
        self._tier = tier
        self._may_leave = may_leave
        self._by_storage: dict[int, Activation] = {}
        self._candidates: deque[Activation] = deque()  # in the order of saving
        self._held: deque[Activation] = deque()  # by others, too
        self.nbytes = 0  # charged
        self.largest_bytes = 0  # of all that there ever were

    def find(self, tensor: torch.Tensor) -> Activation | None:
        """The activation whose storage `tensor` views, if it is kept."""
        return self._by_storage.get(tensor.untyped_storage()._cdata)

    def add(self, activation: Activation) -> None:
        """It is kept from now on. Raises BudgetError."""
        self._count(activation)
        self._by_storage[activation.storage] = activation
        if self._may_leave(activation.nbytes):
            self._candidates.append(activation)

    def _count(self, activation: Activation) -> None:
        self._ledger.charge(self._tier, Account.ACTIVATION, activation.nbytes)
        activation.is_counted = True
        self.nbytes += activation.nbytes
        self.largest_bytes = max(self.largest_bytes, activation.nbytes)

    def _discount(self, activation: Activation) -> None:
        if activation.is_counted:
            self._ledger.release(self._tier, Account.ACTIVATION, activation.nbytes)
            activation.is_counted = False
            self.nbytes -= activation.nbytes

    def remove(self, activation: Activation) -> None:
        """Its tensors are not kept any more."""
        self._discount(activation)
        del self._by_storage[activation.storage]

    def next_to_leave(self) -> Activation | None:
        """The earliest one that frees memory when it leaves; the caller has it leave."""
        while self._candidates:
            activation = self._candidates.popleft()
            if activation.state is not ActivationState.KEPT:
                continue
            if not activation.is_held_by_others():
                return activation
            self._discount(activation)
            self._held.append(activation)
        return None

    def put_back(self, activation: Activation) -> None:
        """What next_to_leave() gave, or let_go_by_others(), cannot leave now."""
        if activation.is_counted:
            self._candidates.appendleft(activation)
        else:  # looked at again later
            self._held.append(activation)

    def let_go_by_others(self) -> Iterator[Activation]:
        """Some that others held and do not hold any more; the caller counts each, or has it leave.

        It looks at a few at each call, by turns.
        """
        for _ in range(min(_LOOKS, len(self._held))):
            activation = self._held.popleft()
            if activation.state is not ActivationState.KEPT:
                continue
            if activation.is_held_by_others():
                self._held.append(activation)
            else:
                yield activation

    def count_again(self, activation: Activation) -> None:
        """It is charged, and may leave next. Raises BudgetError."""
        self._candidates.appendleft(activation)
        self._count(activation)


class DeviceCopies:
    """Copies in slots of the device, fetched from RAM over the link, ahead of backward.

    A slot has what a gathered copy's has: a pin for as long as a tensor views it, and on a device
    that works in order the events of work that uses it. RAM has the bytes, too, so a copy that
    nothing pins can be given up; the earliest saved first, which backward needs last.
    """

    def __init__(self, backend: Backend, ledger: Ledger, nbytes: int, slot_bytes: int) -> None:
        """Takes no memory before the first fetch; then all `nbytes`."""
        self._backend = backend
        self._ledger = ledger
        self._slots = nbytes // slot_bytes
        self._slot_bytes = slot_bytes
        self._pool: RunPool | None = None
        self._fetched = SavingOrder()
        self._endings = Endings()
        self._under_way: deque[Transfer] = deque()  # and some that are done
        self.fetched_bytes = self.left_bytes = 0  # asked for: to the device, and from it

    @property
    def pool(self) -> RunPool:
        """The slots. Raises BudgetError if the device has no room for them."""
        if self._pool is None:
            slots, slot_bytes = self._slots, self._slot_bytes
            arena = self._backend.arena(slots, slot_bytes, self._ledger, Account.ACTIVATION)
            self._pool = RunPool(arena, lambda: slots * slot_bytes, in_one=True)
        return self._pool

    def leave(self, activation: Activation, to: torch.Tensor) -> Transfer:
        """Starts copying the bytes that its tensors view to RAM. Raises an OSError."""
        op = self._backend.to_ram(to, activation.bytes_kept(), activation.streams)
        self.left_bytes += activation.span
        return op

    def fetch(self, activation: Activation, source: torch.Tensor, must: bool = True) -> bool:
        """Starts copying `source`, its bytes in RAM, to slots; False if there is no room.

        Read-ahead (not `must`) takes only the place of what backward needs later. Raises
        BudgetError or an OSError if it cannot be started.
        """
        pool = self.pool
        slots = pool.slots_for(activation.span)
        while (run := pool.take(slots)) is None:
            given_up = self._fetched.take(self._is_unused, None if must else activation)
            if given_up is None:
                return False
            self.drop(given_up)
        try:
            op = self._backend.fetch(pool.view(run, activation.span, pinned=False), source)
        except BaseException:
            pool.give_back(run)
            raise
        self.fetched_bytes += activation.span
        activation.on_device = SlotCopy(run, op)
        self._under_way.append(op)
        self._fetched.add(activation)
        return True

    def wait_for_one(self) -> bool:
        """The host waits until the oldest copy has read its slots in RAM; False if all have."""
        if not self._under_way:
            return False
        with timeline.span("activation"):
            wait_quietly(self._under_way.popleft())  # who needs the copy is told if it failed
        return True

    def _is_unused(self, activation: Activation) -> bool:
        copy = activation.on_device
        return copy is not None and is_unused(copy, self.pool)

    def hand_out(self, activation: Activation) -> HandedOut:
        """The bytes in its slots, for views that backward gets.

        Waits for the copy, or has the device wait before the work that the caller gives to it.

        Raises an OSError if the copy failed; then there is none.
        """
        copy = activation.on_device
        assert copy is not None
        assert copy.op is not None
        if not self._backend.in_order:
            try:
                with timeline.span("activation"):
                    copy.op.wait()
            except BaseException as error:
                self.drop(activation)
                if isinstance(error, OSError):
                    raise activation.lost(error) from error
                raise
        # Also where there is one: on a device each stream that uses the slots is to be known.
        view = self.pool.view(copy.run, activation.span)
        if copy.handed_out is None:
            copy.handed_out = HandedOut(view)
        return copy.handed_out

    def settle(self) -> None:
        """Frees the slots of copies that are done, and that nobody needs."""
        while self._under_way and self._under_way[0].done():
            wait_quietly(self._under_way.popleft())
        self._endings.settle()

    def drop(self, activation: Activation) -> None:
        """It is not needed on the device: its slots are free, once nothing uses them."""
        copy, activation.on_device = activation.on_device, None
        self._fetched.discard(activation)
        if copy is None:
            return
        run, op = copy.run, copy.op
        assert op is not None
        copy.handed_out = None
        if self._backend.in_order:
            self.pool.give_back(run)  # what the slots get next comes after the copy
        else:
            op.cancel()
            self._endings.add(op, lambda: self.pool.give_back(run))
        self.settle()

    def close(self) -> None:
        """Waits for copies under way and gives the slots back; idempotent."""
        while self._under_way:
            wait_quietly(self._under_way.popleft())
        self._endings.finish()
        if self._pool is not None:
            with suppress(OSError):
                self._pool.close()


# Results and gradients on their way, which no budget counts, are of the size of saved tensors.
_SOON = 2


class Movement:
    """Moves activations between the tensors that autograd saved, slots in RAM, and the file.

    Where compute happens in RAM, a saved tensor stays as it is until the budget is needed for
    others. It is copied to slots then, from which it is written: so the tensor's memory, which is
    aligned as the disk does not take it, is free at once, and compute goes on while the disk
    writes. What comes back is used in its slots.

    A device with memory of its own copies saved tensors to RAM over the link, and back to slots of
    the device. Half of the tensors' share is kept before any leaves; the other half is for those
    that are on their way. A tensor that is asked for before its copy is done is used as it is.

    The calling thread keeps others away.
    """

    def __init__(
        self,
        limits: ActivationLimits,
        kept: KeptTensors,
        ram: RamCopies,
        devices: DeviceCopies | None,
        reads_ahead: bool,
        excess: Callable[[int], int],
    ) -> None:
        """
        Args:
            limits: the bytes that there are.
            kept: the tensors that have not left.
            ram: those in slots of RAM, or in the file.
            devices: those on their way over the link; None where compute happens in RAM.
            reads_ahead: what backward needs next comes back before it is asked for.
            excess: by how many bytes the process is too large, if so many more come.
        """
        self._limits = limits
        self._kept = kept
        self._ram = ram
        self._devices = devices
        self._excess = excess
        self._leaving: dict[Activation, Transfer] = {}  # in their order
        self._leaving_bytes = 0
        self.file = ram.file
        self.reads_ahead = reads_ahead

    # Away

    def kept_limit(self, largest_bytes: int) -> int:
        """The maximum of bytes that tensors may keep where compute happens, if the largest has
        `largest_bytes`."""
        if self._devices is not None:
            return self._limits.kept_device_bytes
        usable_bytes = self._limits.usable_bytes
        window = 0 if self.file is None else self._limits.window_bytes(largest_bytes)
        return usable_bytes - window

    def is_one_to_leave(self, nbytes: int, limit: int) -> bool:
        """Whether the earliest begin to leave, if `nbytes` more are kept within `limit`."""
        high_water = limit if self._devices is None else limit // 2
        return self._kept.nbytes - self._leaving_bytes + nbytes > high_water

    def leave(self, activation: Activation) -> bool:
        """Has a KEPT one, which nobody else holds, begin to leave; False if there is no room.

        Raises NativeIoError, StoreError, BudgetError or another OSError; then it is as before, or
        its bytes are in RAM.
        """
        if self._devices is None and self.file is None:
            return False
        activation.measure()
        if not self._with_room(partial(self._ram.take_room, activation)):
            return False
        to = self._ram.view(activation)
        if self._devices is None:
            to.copy_(activation.bytes_kept())
            activation.free_pages()
            self._end_leaving(activation)
            return True
        try:
            self._leaving[activation] = self._devices.leave(activation, to)
        except BaseException:
            self._ram.give_back(activation)
            raise
        activation.state = ActivationState.LEAVING
        if activation.is_counted:
            self._leaving_bytes += activation.nbytes
        return True

    def _end_leaving(self, activation: Activation) -> None:
        """Its bytes are in slots of RAM."""
        activation.let_tensors_go()
        self._kept.remove(activation)
        self._ram.filled(activation)

    def _with_room(self, take: Callable[[], bool]) -> bool:
        """Whether take() finds room in RAM, if need be when what is LEAVING has left: it can be
        written then."""
        while not take():
            if not self._finish_first_leaving():
                return False
        return True

    def _finish_first_leaving(self) -> bool:
        """Waits until the first one that is LEAVING has left; False if there is none."""
        if not self._leaving:
            return False
        with timeline.span("activation"):
            self.finish_leaving(next(iter(self._leaving)))
        return True

    def finish_leaving(self, activation: Activation) -> None:
        """Waits until one that is LEAVING has left. Raises an OSError; then it is KEPT."""
        op = self._no_longer_leaving(activation)
        activation.state = ActivationState.KEPT
        try:
            op.wait()
        except BaseException as error:
            self._ram.give_back(activation)
            self._kept.put_back(activation)
            if isinstance(error, OSError):
                raise activation.lost(error) from error
            raise
        self._end_leaving(activation)

    def _no_longer_leaving(self, activation: Activation) -> Transfer:
        if activation.is_counted:
            self._leaving_bytes -= activation.nbytes
        return self._leaving.pop(activation)

    def wait_for_room(self, nbytes: int) -> bool:
        """Waits until tensors of `nbytes` more can be kept; False if they cannot.

        Raises as leave().
        """
        if self._devices is None:
            left = self._limits.usable_bytes - self._kept.nbytes - nbytes
            return left >= 0 and self._ram.shrink_to(left)
        while self._kept.nbytes + nbytes > self._limits.kept_device_bytes:
            if not self._finish_first_leaving():
                return False
        return True

    # Back

    def begin_return(self, activation: Activation, must: bool) -> bool:
        """Starts bringing one that has left back; False if there is no room.

        `must`: backward waits for it, which takes the room of what it needs later.
        """
        if activation.on_device is not None:
            return True
        if activation.state is ActivationState.ON_DISK:
            begin = partial(self._ram.begin_reading, activation, must)
            if not (self._with_room(begin) if must else begin()):
                return False
        if activation.state is ActivationState.READING:
            if not must:
                return True
            self._ram.await_read(activation)
            if self._devices is not None:
                with timeline.span("activation"):
                    self._ram.finish_reading(activation)
        if self._devices is None:
            return True
        return self._devices.fetch(activation, self._ram.view(activation), must)

    def finish_return(self, activation: Activation) -> HandedOut:
        """Waits until it is back; its bytes, where compute happens. Raises an OSError."""
        if self._devices is not None:
            return self._devices.hand_out(activation)
        if activation.state is ActivationState.READING:
            with timeline.span("activation"):
                self._ram.finish_reading(activation)
        assert activation.in_ram is not None
        if activation.in_ram.handed_out is None:
            activation.in_ram.handed_out = HandedOut(self._ram.view(activation))
        return activation.in_ram.handed_out

    def read_ahead(self, upcoming: Iterable[Activation]) -> None:
        """Starts bringing back what is `upcoming`, in that order, as far as there is room."""
        self._ram.settle()  # what has been read can be fetched
        self._give_way()
        for activation in upcoming:
            if not activation.is_kept and not self.begin_return(activation, must=False):
                return

    # Ends

    def settle(self) -> None:
        """Takes account of transfers that are done."""
        while self._leaving and next(iter(self._leaving.values())).done():
            self.finish_leaving(next(iter(self._leaving)))
        self._ram.settle()
        if self._devices is not None:
            self._devices.settle()
        self._give_way()

    def _give_way(self) -> None:
        """Lends what the rest of the process needs of RAM for now, where compute happens there."""
        if self._devices is None and self.file is not None:
            largest = self._kept.largest_bytes
            if excess := self._excess(_SOON * largest):
                in_use_bytes = self._kept.nbytes + self._ram.pool.pinned_bytes
                self._limits.lend(excess, largest, in_use_bytes)

    def drop(self, activation: Activation) -> None:
        """No graph needs it: all that it has is free, once no transfer and no tensor uses it."""
        if activation.state is ActivationState.GONE:
            return
        if not activation.is_kept:
            if self._devices is not None:
                self._devices.drop(activation)
            self._ram.drop(activation)
            return
        if activation.state is ActivationState.LEAVING:
            op = self._no_longer_leaving(activation)
            op.cancel()
            self._ram.endings.add(op, partial(self._ram.give_back, activation))
        self._kept.remove(activation)
        activation.state = ActivationState.GONE

    def rest(self) -> None:
        """No graph has activations: memory that can be had again at no cost is given back.

        RAM behind a link stays page-locked, and the device's slots as one piece.
        """
        self._ram.settle()
        if self._devices is not None:
            self._devices.settle()
        self._limits.lent_bytes = 0
        self._ram.pool.shrink()

    def close(self) -> None:
        """Waits until nothing is under way, and gives all memory and the file back."""
        if self._devices is not None:
            self._devices.close()
        self._ram.finish()
        self._ram.pool.close()
        if self.file is not None:
            self.file.close()

    # Numbers

    @property
    def fixed_bytes(self) -> int:
        """Of slots of RAM, the bytes that were taken in one piece and are not given back."""
        return 0 if self._devices is None else self._ram.pool.charged_bytes

    @property
    def device_bytes(self) -> tuple[int, int]:
        """Bytes copied so far to a device with memory of its own, and from it."""
        devices = self._devices
        return (0, 0) if devices is None else (devices.fetched_bytes, devices.left_bytes)

    # Words

    def too_large(self, activation: Activation) -> str:
        """Says why tensors of its size can never be kept."""
        if self._devices is not None:
            return (
                f"{activation.words} is too large for the part of device_memory that activations "
                f"have, {_exact(self._limits.device_bytes)}, of which half is for tensors as they "
                f"are"
            )
        least = 3 * activation.nbytes if self.file is not None else activation.nbytes
        return (
            f"{activation.words} is too large for activation_memory, "
            f"{_exact(self._limits.host_bytes)}; raise it to {_exact(least)} at least"
        )

    def no_room(self, activation: Activation, saved: int) -> str:
        """Says why there is no room for its tensors, beside so many activations."""
        fix = "raise it, or save less (activation checkpointing, smaller micro-batches)"
        if self.file is None:
            fix = "give nvme_path, a directory on NVMe for the rest, or raise it"
        return (
            f"activation_memory, {_exact(self._limits.host_bytes)}, has no room for "
            f"{activation.words}: {self._in_use()} of {saved} activations are in use; {fix}"
        )

    def no_way_back(self, activation: Activation) -> str:
        """Says why there is no room to bring it back."""
        return (
            f"activation_memory, {_exact(self._limits.host_bytes)}, has no room to bring back "
            f"{activation.words}: {self._in_use()} are in use, of tensors that one step of "
            f"backward has together; raise it"
        )

    def _in_use(self) -> str:
        kept = format_bytes(self._kept.nbytes)
        slots = format_bytes(self._ram.pool.used_bytes + self._ram.pool.pinned_bytes)
        return f"{kept} in tensors and {slots} in slots"


def _exact(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} ({nbytes} bytes)"
