"""Memory of a device that works in streams, and RAM that its copies use.

The device does later what it is given. So a slot has events, besides pins: before a copy writes to
a slot, all work must be done that was given while the slot was pinned; and before work reads the
slot, the copy. The device waits for both, not the host.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from offload._native import Arena
from offload.errors import BudgetError, HeteroError
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.sizes import format_bytes
from offload.memory.tiers import Account, Tier

if TYPE_CHECKING:
    from offload.device.cuda_runtime import CudaRuntime, Event, Stream

NOT_PAGE_LOCKED = "RAM cannot be page-locked"  # how the note begins


def check_not_capturing(runtime: CudaRuntime) -> None:
    """Raises HeteroError if work is captured in a CUDA graph now.

    Parameters are gathered, and gradients kept, by hooks, which do not run when a graph is
    replayed: it would compute with whatever is in the slots then.
    """
    if runtime.capturing():
        raise HeteroError(
            "a CUDA graph is being captured, but hetero moves parameters and gradients in hooks, "
            "which a replayed graph does not run; call the model outside of the capture"
        )


class DeviceArena(HostArena):
    """Slots in one allocation of the device's memory, all charged from the start."""

    def __init__(
        self, runtime: CudaRuntime, slots: int, slot_bytes: int, ledger: Ledger, account: Account
    ) -> None:
        """Raises BudgetError if the budget, or the device, has no room."""
        self._runtime = runtime
        # Reentrant: the garbage collector may close what it finds at any time.
        self._lock = threading.RLock()  # guards all below
        # Runs that are pinned, or were when last looked at: length, and the streams with work.
        self._used: dict[int, tuple[int, dict[Stream, None]]] = {}
        # By slot and stream, the event after which no work uses it, of pins that have ended.
        self._unused_after: dict[int, dict[Stream, Event]] = {}
        self._written: dict[int, tuple[int, Event]] = {}  # the last write to a run that began here
        self._stream = runtime.current_stream()  # in which the memory was allocated
        super().__init__(slots, slot_bytes, ledger, account, Tier.DEVICE)

    def _map(self, nbytes: int) -> Arena:
        self._ledger.charge(Tier.DEVICE, self._account, nbytes)
        try:
            block = self._runtime.empty(nbytes)
            self._committed, self.charged_slots = bytearray(b"\1" * self.slots), self.slots
            # The allocator orders new uses of memory after old ones in the current stream alone;
            # copies are in another one.
            self._stream = self._runtime.current_stream()
            allocated = {self._stream: self._runtime.record(self._stream)}
            with self._lock:
                self._unused_after = {slot: allocated.copy() for slot in range(self.slots)}
            where = self._runtime.dlpack_device
            return Arena.over(block.data_ptr(), nbytes, *where, block, self.slot_bytes)
        except RuntimeError as error:
            self._ledger.release(Tier.DEVICE, self._account, nbytes)
            free, total = self._runtime.memory()
            in_use, taken, _ = self._runtime.torch_bytes()
            raise BudgetError(
                f"the device has no room for {format_bytes(nbytes)} ({self._account.value}): of "
                f"{format_bytes(total)} {format_bytes(free)} are free, and torch has "
                f"{format_bytes(taken)}, of which tensors take {format_bytes(in_use)}; lower "
                f"device_memory, or free what else is there ({str(error).splitlines()[0]})"
            ) from error

    def view(self, slot: int, run: int, dtype: torch.dtype, pinned: bool = False) -> torch.Tensor:
        """As HostArena. Work that is given to the device with a pinned view follows its copy."""
        if not pinned:
            return super().view(slot, run, dtype)
        check_not_capturing(self._runtime)
        with self._lock:
            self._note_unpinned()  # of other slots, before more work comes to their streams
            stream = self._runtime.current_stream()
            for event in self._writes(slot, run):
                self._runtime.wait(stream, event)
            view = super().view(slot, run, dtype, pinned)
            _, streams = self._used.get(slot, (0, {}))
            self._used[slot] = run, {**streams, stream: None}
            return view

    def share(self, view: torch.Tensor) -> None:
        """As HostArena; in a stream of the caller's own it is as a view of its own."""
        with self._lock:
            slot = self.slot_of(view.data_ptr())
            if slot is not None and slot in self._used:
                run, streams = self._used[slot]
                if self._runtime.current_stream() not in streams:
                    self.view(slot, run, view.dtype, pinned=True)

    def _note_unpinned(self) -> None:
        """Records when work ends with runs whose pins are gone. Needs the lock.

        One event for each stream that any of them was used in; it comes after a stream's older
        ones, which need not be kept.
        """
        events: dict[Stream, Event] = {}
        for first, (run, streams) in list(self._used.items()):
            if self.pins[first] == 0:
                del self._used[first]
                for stream in streams:
                    if stream not in events:
                        events[stream] = self._runtime.record(stream)
                ended = {stream: events[stream] for stream in streams}
                for slot in range(first, first + run):
                    self._unused_after.setdefault(slot, {}).update(ended)

    def before_write(self, slot: int, run: int) -> list[Event]:
        """When the work is done that uses slots [slot, slot + run), which nothing pins.

        Also what writes to them: another stream may have been given that. A write that waits for
        all this is told by written().
        """
        with self._lock:
            self._note_unpinned()
            ended = (self._unused_after.get(each, {}) for each in range(slot, slot + run))
            events = [event for of_slot in ended for event in of_slot.values()]
            return list(dict.fromkeys([*events, *self._writes(slot, run)]))

    def _writes(self, slot: int, run: int) -> list[Event]:
        """The last writes to slots [slot, slot + run). Needs the lock."""
        written = self._written.items()
        return [e for first, (n, e) in written if first < slot + run and slot < first + n]

    def written(self, slot: int, run: int, event: Event) -> None:
        """A copy, or a gather, to slots [slot, slot + run) is done at `event`."""
        with self._lock:
            for first, (length, _) in list(self._written.items()):
                if first < slot + run and slot < first + length:
                    del self._written[first]
            self._written[slot] = run, event
            for each in range(slot, slot + run):
                self._unused_after.pop(each, None)

    def close(self) -> None:
        """Gives the memory back; idempotent. The host does not wait for work that uses it.

        The stream in which it was allocated does: the allocator gives it to nobody else but in
        that stream's order, or after waiting for it. Some uses are noted nowhere, as reads by
        copies from here, so it waits for all that our streams were given.
        """
        if self._memory is not None:
            with self._lock:
                streams: set[Stream] = set(self._runtime.streams)
                for _, used in self._used.values():
                    streams.update(used)
                for ended in self._unused_after.values():
                    streams.update(ended)
                for stream in streams - {self._stream}:
                    with suppress(RuntimeError):  # the device's, which its next user meets
                        self._runtime.wait(self._stream, self._runtime.record(stream))
                self._used.clear()
                self._unused_after.clear()
                self._written.clear()
        super().close()


class PageLockedArena(HostArena):
    """RAM whose committed slots are page-locked, and no others; they stay so until close()."""

    def __init__(
        self,
        runtime: CudaRuntime,
        notes: list[str],
        slots: int,
        slot_bytes: int,
        ledger: Ledger,
        account: Account,
    ) -> None:
        """RAM that cannot be page-locked is used nevertheless; `notes` says so."""
        self._runtime = runtime
        self._notes = notes
        self._page_locked: list[int] = []  # the first slots of ranges
        super().__init__(slots, slot_bytes, ledger, account)

    def commit(self, slot: int, run: int = 1) -> None:
        """As HostArena. What is committed in one call is one range, which a copy may span."""
        fresh = list(self.runs(slot, run, charged=False))
        super().commit(slot, run)
        for first, slots in fresh:
            # Page-locking would populate the pages, too, but in one thread, with a lock of the
            # process held. torch's threads write the zeros that are there.
            self.view(first, slots, torch.uint8).zero_()
            self._page_lock(first, slots)

    def _page_lock(self, slot: int, run: int) -> None:
        failure = self._runtime.register(self.address(slot), run * self.slot_bytes)
        if failure is None:
            self._page_locked.append(slot)
            # fork() would copy page-locked memory for the child, which cannot use the device.
            self.memory.wipe_on_fork(slot * self.slot_bytes, run * self.slot_bytes)
            return
        note = (
            f"{NOT_PAGE_LOCKED} ({failure}), so copies between it and the device are "
            f"slower and do not overlap with compute"
        )
        if note not in self._notes:
            self._notes.append(note)

    def close(self) -> None:
        """As HostArena. Waits for copies, of which some may be ahead of their use."""
        if self._page_locked:
            with suppress(RuntimeError):  # the device's, which its next user meets
                self._runtime.synchronize_all()
            while self._page_locked:
                self._runtime.unregister(self.address(self._page_locked.pop()))
        super().close()
