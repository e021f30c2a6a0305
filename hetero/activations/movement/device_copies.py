"""Activations that are brought back to a device with memory of its own."""

from __future__ import annotations

from collections import deque
from contextlib import suppress

import torch

from hetero.activations.activation import Activation, DeviceCopy
from hetero.activations.handed_out import HandedOut
from hetero.activations.movement.earliest_first import EarliestFirst
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
        self._fetched = EarliestFirst(self._is_unused)
        self._ending: list[DeviceCopy] = []
        self._under_way: deque[Transfer] = deque()  # and some that are done
        self.fetched_bytes = 0  # asked for

    @property
    def nbytes(self) -> int:
        """Of all slots."""
        return self._slots * self._slot_bytes

    @property
    def pool(self) -> RunPool:
        """The slots. Raises BudgetError if the device has no room for them."""
        if self._pool is None:
            arena = self._backend.arena(
                self._slots, self._slot_bytes, self._ledger, Account.ACTIVATION
            )
            self._pool = RunPool(arena, lambda: self.nbytes, in_one=True)
        return self._pool

    def fetch(self, activation: Activation, source: torch.Tensor, must: bool = True) -> bool:
        """Starts copying `source`, its bytes in RAM, to slots; False if there is no room.

        What need not be there yet takes only the place of what backward needs later. Raises
        BudgetError or an OSError if it cannot be started.
        """
        pool = self.pool
        slots = pool.slots_for(activation.span)
        while (run := pool.take(slots)) is None:
            if not self._give_up(None if must else activation.number):
                return False
        try:
            op = self._backend.fetch(pool.view(run, activation.span, pinned=False), source)
        except BaseException:
            pool.give_back(run)
            raise
        self.fetched_bytes += activation.span
        activation.on_device = DeviceCopy(run, op)
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

    def _give_up(self, before: int | None) -> bool:
        """The earliest copy that nothing pins, of before that number, is given up."""
        activation = self._fetched.take(before)
        if activation is not None:
            self.drop(activation)
        return activation is not None

    def _is_unused(self, activation: Activation) -> bool:
        copy = activation.on_device
        if copy is None:
            return False
        back = copy.handed_out
        if back is not None:
            return not (back.is_viewed or back.is_changed)  # a change is to be refused
        return not self.pool.is_pinned(copy.run)

    def hand_out(self, activation: Activation) -> HandedOut:
        """The bytes in its slots, for views that backward gets.

        Waits for the copy, or has the device wait before the work that the caller gives to it.

        Raises an OSError if the copy failed; then there is none.
        """
        copy = activation.on_device
        assert copy is not None
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
        going_on = []
        for copy in self._ending:
            if self._backend.in_order or copy.op.done():
                wait_quietly(None if self._backend.in_order else copy.op)
                self.pool.give_back(copy.run)
            else:
                going_on.append(copy)
        self._ending = going_on

    def drop(self, activation: Activation) -> None:
        """It is not needed on the device: its slots are free, once nothing uses them."""
        copy, activation.on_device = activation.on_device, None
        self._fetched.discard(activation)
        if copy is not None:
            copy.handed_out = None
            if not self._backend.in_order:
                copy.op.cancel()
            self._ending.append(copy)
            self.settle()

    def close(self) -> None:
        """Waits for copies under way and gives the slots back; idempotent."""
        for op in (*self._under_way, *(copy.op for copy in self._ending)):
            wait_quietly(op)
        self._ending.clear()
        self._under_way.clear()
        if self._pool is not None:
            with suppress(OSError):
                self._pool.close()
