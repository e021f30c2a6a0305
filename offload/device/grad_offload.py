"""Gradients on their way from the device to where they are kept in RAM.

A gradient that is the first of its step and has the kept dtype is copied straight to its home,
whole. One that is added or converted passes in parts through buffers in RAM, where it is added in
fp32 and rounded once, so with the same bits. A native thread (native/link/offload_queue.h) starts a
GPU's copies, waits for them, and has idle threads of the worker pool add: Python submits a gradient
and waits for it, whatever its size. Bytes under way are charged to DEVICE and limited.
Code that reads a kept gradient waits for what is on its way to it, and gets the error if that was
lost.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from offload.device.backend import Backend
from offload.errors import BudgetError, HeteroError
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.operation import Operation, Worker, wait_quietly
from offload.memory.sizes import PAGE_BYTES, format_bytes, round_up
from offload.memory.tiers import Account, Tier

BUFFERS = 8  # in RAM at most, each for a part of a gradient that is on its way
_MOST_BUFFER_BYTES = 1 << 20


def buffer_sizes(largest_bytes: int) -> tuple[int, int]:
    """How many buffers there are, and the bytes of each, whole pages.

    Together they have room for two gradients of `largest_bytes`, the largest ones, if those are
    small.
    """
    two = 2 * round_up(largest_bytes, PAGE_BYTES)
    nbytes = min(_MOST_BUFFER_BYTES, round_up(-(-two // BUFFERS), PAGE_BYTES))
    return min(BUFFERS, two // nbytes), nbytes


@dataclass(eq=False)
class _Item:
    """One gradient; it lives on the device until all of it is in RAM."""

    owner: Hashable
    grad: torch.Tensor  # flat
    kept: torch.Tensor  # flat
    add: bool
    after: Any = None  # the device's event after which it is computed
    op: Operation | None = None
    error: BaseException | None = None


class GradOffload:
    """Copies gradients to where they are kept, or adds them to what is there, in other threads.

    A first gradient of the dtype that is kept is copied straight to its place, whole. Another one
    comes to buffers in RAM and is added there (or converted), in the dtype of what is kept: the
    backend does that, and there is one thing to do for each gradient, whatever its size, to wait
    for it. Gradients of one owner arrive in the order in which they were given. Callers that
    read what is kept call wait() first, which raises an error until the owner's gradient is
    replaced.

    A gradient's bytes are charged to the device until it has arrived, and limited: beyond the limit
    take() waits for the oldest one.
    """

    def __init__(
        self, backend: Backend, ledger: Ledger, limit_bytes: int, buffers: HostArena
    ) -> None:
        """`buffers` are slots in RAM, and last longer. One gradient may pass the limit."""
        self._backend = backend
        self._ledger = ledger
        self.limit_bytes = limit_bytes  # may change; 0: nothing is to come
        self._copies = backend.offload_queue(buffers)
        self._changed = threading.Condition()  # guards all below
        self._queue: deque[_Item] = deque()  # under way, in their order
        self._in_flight_bytes = 0
        self._pending: dict[Hashable, int] = {}  # gradients under way, of those who have some
        self._errors: dict[Hashable, BaseException] = {}
        self._closing = False
        self._worker = Worker("grad-offload")
        self.wait_s = 0.0  # that take() has waited for room on the device

    def take(
        self, owner: Hashable, name: str, grad: torch.Tensor, kept: torch.Tensor, add: bool
    ) -> None:
        """Starts bringing `grad` to `kept`, both of `owner`; `add`: to be added to what is there.

        Both are held until that is done, and must not be changed by others. Raises BudgetError,
        with nothing begun, if the device's budget cannot hold it; `name` is the parameter's.
        """
        grad, kept = _plain(grad.detach()).view(-1), kept.view(-1)
        with self._changed:
            began_s = time.perf_counter()
            while self._in_flight_bytes and self._in_flight_bytes + grad.nbytes > self.limit_bytes:
                self._changed.wait()
            self.wait_s += time.perf_counter() - began_s
            straight = not add and grad.dtype is kept.dtype
            if straight:  # it must not arrive before gradients that are still to be added
                while owner in self._pending:
                    self._changed.wait()
            try:
                self._ledger.charge(Tier.DEVICE, Account.GRAD_SLOT, grad.nbytes)
            except BudgetError as error:
                raise BudgetError(
                    f"the gradient of {name}, {format_bytes(grad.nbytes)}, cannot be on the device "
                    f"while it is copied to RAM: {error}"
                ) from None
            item = _Item(owner, grad, kept, add)
            try:
                if self._closing:
                    raise HeteroError("the engine was closed")
                item.after = self._backend.record_event()
                item.op = self._backend.offload(self._copies, kept, grad, add, item.after)
                self._worker.do(self._finish_next)
            except BaseException:
                if item.op is not None:  # the thread cannot start; the copy uses both tensors
                    item.op.cancel()
                    wait_quietly(item.op)
                self._ledger.release(Tier.DEVICE, Account.GRAD_SLOT, grad.nbytes)
                raise
            self._in_flight_bytes += grad.nbytes
            self._pending[owner] = self._pending.get(owner, 0) + 1
            self._queue.append(item)

    def busy(self, owner: Hashable) -> bool:
        """Whether gradients of `owner` are under way."""
        with self._changed:
            return owner in self._pending

    def lost(self, owner: Hashable) -> bool:
        """Whether a gradient of `owner` did not arrive, as wait() says."""
        with self._changed:
            return owner in self._errors

    def wait(self, owner: Hashable, name: str) -> None:
        """Until what is kept of `owner` has all its gradients.

        Raises HeteroError if one was lost on the way.
        """
        self.wait_ended(owner)
        error = self._errors.get(owner)
        if error is not None:
            raise HeteroError(
                f"the gradient of {name} did not arrive in RAM: {error}; clear the gradients with "
                f"optimizer.zero_grad() and make the backward again"
            ) from error

    def wait_ended(self, owner: Hashable) -> None:
        """Until no gradient of `owner` is under way, whether they arrived or not."""
        with self._changed:
            while owner in self._pending:
                self._changed.wait()

    def wait_one(self) -> bool:
        """Until one more gradient than now has arrived; False if none is under way."""
        with self._changed:
            count = len(self._queue)
            # (The only thread that calls take() waits here, so that no more come.)
            while count and len(self._queue) >= count:
                self._changed.wait()
            return count > 0

    # In the worker's thread

    def _finish_next(self) -> None:
        """Waits for the oldest gradient that is under way."""
        with self._changed:
            item = self._queue[0]
        try:
            assert item.op is not None
            item.op.wait()
        except BaseException as error:
            item.error = error
        with self._changed:
            self._queue.popleft()
            self._end(item)

    def _end(self, item: _Item) -> None:
        """Needs the lock."""
        nbytes = item.grad.nbytes
        # Pins end before the waiting thread goes on.
        del item.grad, item.kept
        item.op = item.after = None
        self._ledger.release(Tier.DEVICE, Account.GRAD_SLOT, nbytes)
        self._in_flight_bytes -= nbytes
        self._pending[item.owner] -= 1
        if not self._pending[item.owner]:
            del self._pending[item.owner]
        if item.error is not None:
            self._errors[item.owner] = item.error.with_traceback(None)
        elif not item.add:  # what was lost before was not needed any more
            self._errors.pop(item.owner, None)
        self._changed.notify_all()

    def close(self) -> None:
        """Drops what is not in RAM yet and ends the thread; idempotent."""
        with self._changed:
            self._closing = True
            for item in self._queue:
                if item.op is not None:
                    item.op.cancel()
        self._worker.close()
        if self._copies is not None:
            self._copies.close()


def _plain(grad: torch.Tensor) -> torch.Tensor:
    """A tensor of the same values, which are in its memory one after another."""
    if grad.is_neg() or grad._is_zerotensor():  # the memory has other values, or there is none
        grad = grad.clone()
    return grad.contiguous()
