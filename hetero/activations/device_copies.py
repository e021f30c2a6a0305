"""Activations on their way over the link: from a device with memory of its own, and back there."""

from __future__ import annotations

from collections import deque
from contextlib import suppress

import torch

from hetero.activations.activation import Activation, HandedOut, SavingOrder, SlotCopy
from hetero.activations.ram_copies import Endings, is_unused
from offload import timeline
from offload.device.backend import Backend
from offload.memory.ledger import Ledger
from offload.memory.operation import Transfer, wait_quietly
from offload.memory.run_pool import RunPool
from offload.memory.tiers import Account


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
        op = self._backend.to_ram(to, activation.bytes_kept(), self._backend.record_event())
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
