"""Memory of a device that works in streams, and RAM that its copies use.

Whoever uses a slot's memory on the device gives it work that is done later. So a slot has moments,
besides leases: before a copy is written to it, all work must be done that was given while it was
leased; and before work reads it, the copy. Both are waited for by the device, not by the host.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from offload._native import Arena
from offload.arena import HostArena
from offload.errors import BudgetError
from offload.ledger import Ledger
from offload.sizes import format_bytes
from offload.tiers import Account, Tier

if TYPE_CHECKING:
    from offload.cuda_runtime import Event, Runtime, Stream


class DeviceArena(HostArena):
    """Slots in one allocation of the device's memory, all charged from the start."""

    def __init__(
        self, runtime: Runtime, slots: int, slot_bytes: int, ledger: Ledger, account: Account
    ) -> None:
        """Raises BudgetError if the budget, or the device, has no room."""
        self._runtime = runtime
        # Reentrant: the garbage collector may close what it finds at any time.
        self._lock = threading.RLock()  # guards all below
        # Runs that are leased, or were when last looked at: length, and the streams with work.
        self._used: dict[int, tuple[int, dict[Stream, None]]] = {}
        self._over: dict[int, list[Event]] = {}  # when work with a slot that is free is done
        self._written: dict[int, tuple[int, Event]] = {}  # the last copy to a run that began here
        super().__init__(slots, slot_bytes, ledger, account, Tier.DEVICE)

    def _map(self, nbytes: int) -> Arena:
        self._ledger.charge(Tier.DEVICE, self._account, nbytes)
        try:
            block = self._runtime.empty(nbytes)
            self._committed = [True] * self.slots
            where = self._runtime.dlpack_device
            return Arena.over(block.data_ptr(), nbytes, *where, block, self.slot_bytes)
        except RuntimeError as error:
            self._committed = [False] * self.slots
            self._ledger.release(Tier.DEVICE, self._account, nbytes)
            free, total = self._runtime.memory()
            in_use, taken, _ = self._runtime.torch_bytes()
            raise BudgetError(
                f"the device has no room for {format_bytes(nbytes)} ({self._account.value}): of "
                f"{format_bytes(total)} {format_bytes(free)} are free, and torch has "
                f"{format_bytes(taken)}, of which tensors take {format_bytes(in_use)}; lower "
                f"device_memory, or free what else is there ({str(error).splitlines()[0]})"
            ) from error

    def decommit(self, slot: int, run: int) -> None:
        """Nothing: the memory is taken and given back as a whole."""

    def view(self, slot: int, run: int, dtype: torch.dtype, leased: bool = False) -> torch.Tensor:
        """As HostArena. Work that is given to the device with a leased view follows its copy."""
        if not leased:
            return super().view(slot, run, dtype)
        with self._lock:
            self._note_over()  # of others, before more is given after them
            stream = self._runtime.current_stream()
            written = self._written.get(slot)
            if written is not None:
                self._runtime.wait(stream, written[1])
            view = super().view(slot, run, dtype, leased)
            _, streams = self._used.get(slot, (0, {}))
            self._used[slot] = run, {**streams, stream: None}
            return view

    def _note_over(self) -> None:
        """Records when work ends with runs whose leases are gone. Needs the lock."""
        for first, (run, streams) in list(self._used.items()):
            if self.leases[first] == 0:
                del self._used[first]
                events = [self._runtime.record(stream) for stream in streams]
                for slot in range(first, first + run):
                    self._over.setdefault(slot, []).extend(events)

    def before_write(self, slot: int, run: int) -> list[Event]:
        """When the work is done that uses slots [slot, slot + run), which nothing leases."""
        with self._lock:
            self._note_over()
            slots = range(slot, slot + run)
            return list(dict.fromkeys(e for s in slots for e in self._over.pop(s, ())))

    def written(self, slot: int, run: int, event: Event) -> None:
        """A copy to slots [slot, slot + run) is done at `event`."""
        with self._lock:
            for first, (length, _) in list(self._written.items()):
                if first < slot + run and slot < first + length:
                    del self._written[first]
            self._written[slot] = run, event

    def close(self) -> None:
        """Waits until no work uses the memory, and gives it back; idempotent."""
        if self._memory is not None:
            with suppress(RuntimeError):  # of the device's, which who uses it next meets
                self._runtime.synchronize_all()
            with self._lock:
                self._used.clear()
                self._over.clear()
                self._written.clear()
        super().close()


class PinnedArena(HostArena):
    """RAM whose committed slots are pinned: exactly these, and none before it is needed."""

    def __init__(
        self,
        runtime: Runtime,
        notes: list[str],
        slots: int,
        slot_bytes: int,
        ledger: Ledger,
        account: Account,
    ) -> None:
        """What cannot be pinned is used all the same, and told in `notes`."""
        self._runtime = runtime
        self._notes = notes
        self._pinned: dict[int, int] = {}  # first slot of a range -> its slots
        super().__init__(slots, slot_bytes, ledger, account)

    def commit(self, slot: int, run: int = 1) -> None:
        """As HostArena. What is committed in one call is one range, which a copy may span."""
        fresh = [s for s in range(slot, slot + run) if not self._committed[s]]
        super().commit(slot, run)
        while fresh:
            first = fresh.pop(0)
            length = 1
            while fresh and fresh[0] == first + length:
                fresh.pop(0)
                length += 1
            self._pin(first, length)

    def _pin(self, slot: int, run: int) -> None:
        failure = self._runtime.register(self.address(slot), run * self.slot_bytes)
        if failure is None:
            self._pinned[slot] = run
            # fork() would copy pinned pages for the child, which cannot use the device anyway.
            self.memory.wipe_on_fork(slot * self.slot_bytes, run * self.slot_bytes)
            return
        note = (
            f"RAM cannot be pinned ({failure}), so copies between it and the device are slower "
            f"and do not overlap with compute"
        )
        if note not in self._notes:
            self._notes.append(note)

    def decommit(self, slot: int, run: int) -> None:
        """As HostArena; ranges that are cut stay pinned where they are not given up."""
        for first, length in list(self._pinned.items()):
            if first < slot + run and slot < first + length:
                self._unpin(first)
                if first < slot:
                    self._pin(first, slot - first)
                if slot + run < first + length:
                    self._pin(slot + run, first + length - slot - run)
        super().decommit(slot, run)

    def _unpin(self, first: int) -> None:
        del self._pinned[first]
        self._runtime.unregister(self.address(first))

    def close(self) -> None:
        """As HostArena; no copy uses the memory any more."""
        if self._memory is not None:
            for first in list(self._pinned):
                self._unpin(first)
        super().close()
