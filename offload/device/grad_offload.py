"""Gradients on their way from the device to where they are kept in RAM."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from offload.device.backend import Backend
from offload.errors import BudgetError, HeteroError
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.operation import Operation, Worker
from offload.memory.sizes import PAGE_BYTES, format_bytes, round_up
from offload.memory.tiers import Account, Tier

BUFFERS = 2  # in RAM: one receives a tile while the one before it is added
_MOST_BUFFER_BYTES = 4 << 20
# Elements that torch copies or adds in the calling thread. More would start a team of threads for
# this one, on the same cores as compute's.
_SERIAL_NUMEL = 1 << 14


def buffer_bytes(largest_bytes: int) -> int:
    """Bytes of each buffer, whole pages, if no gradient is larger than `largest_bytes`."""
    return min(_MOST_BUFFER_BYTES, round_up(largest_bytes, PAGE_BYTES))


@dataclass(eq=False)
class _Item:
    """One gradient; it lives on the device until all of it is in RAM."""

    owner: Hashable
    grad: torch.Tensor  # flat
    kept: torch.Tensor  # flat
    add: bool
    after: Any = None  # the device's event after which it is computed
    op: Operation | None = None  # of a gradient that is copied straight to its place
    error: BaseException | None = None
    begun: int = 0  # elements whose copies were started


@dataclass(eq=False)
class _Tile:
    item: _Item
    op: Operation | None
    into: torch.Tensor | None = field(default=None, repr=False)  # of what is kept
    buffer: torch.Tensor | None = field(default=None, repr=False)
    last: bool = True


class GradOffload:
    """Copies gradients to where they are kept, or adds them to what is there, in a thread.

    A first gradient of the dtype that is kept is copied straight to its place. Another one comes to
    a buffer in RAM, tile by tile, and is added there (or converted), in the dtype of what is
    kept. Gradients of one owner arrive in the order in which they were given. Callers that read
    what is kept call wait() first, which raises an error until the owner's gradient is replaced.

    A gradient's bytes are charged to the device until it has arrived, and limited: beyond the limit
    take() waits for the oldest one.
    """

    def __init__(
        self, backend: Backend, ledger: Ledger, limit_bytes: int, buffers: HostArena
    ) -> None:
        """`buffers` has BUFFERS slots in RAM, and lasts longer. One gradient may pass the limit."""
        self._backend = backend
        self._ledger = ledger
        self.limit_bytes = limit_bytes  # may change; 0: nothing is to come
        self._buffers = buffers
        self._next_buffer = 0
        self._changed = threading.Condition()  # guards all below
        self._queue: deque[_Item] = deque()
        self._ahead: deque[_Tile] = deque()  # on their way, the one that is waited for first
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
        grad, kept = grad.detach().contiguous().view(-1), kept.view(-1)
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
                if straight:
                    item.op = self._backend.grad_offload(kept, grad, item.after)
                self._worker.do(self._work)
            except BaseException:
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
            count = self._count()
            # (The only thread that calls take() waits here, so that no more come.)
            while count and self._count() >= count:
                self._changed.wait()
            return count > 0

    def _count(self) -> int:
        return sum(self._pending.values())

    # In the worker's thread

    def _work(self) -> None:
        """Finishes all that was taken; nothing, if a job for what was taken before has done so."""
        while self._look_ahead():
            self._finish(self._ahead[0])
            with self._changed:
                self._ahead.popleft()

    def _look_ahead(self) -> bool:
        """Starts tiles. False if there are none."""
        # A function of its own, because a variable of _work() would hold the last item.
        with self._changed:
            while self._queue and len(self._ahead) < BUFFERS:
                tile = self._start(self._queue[0])
                if tile.last:
                    self._queue.popleft()
                self._ahead.append(tile)
            return bool(self._ahead)

    def _start(self, item: _Item) -> _Tile:
        if item.op is not None:
            return _Tile(item, item.op)
        try:
            if self._closing:
                raise HeteroError("the engine was closed")
            if item.error is not None:
                return _Tile(item, None)  # the rest of it does not matter
            bytes_ = self._buffers.view(self._next_buffer, 1, torch.uint8)
            self._next_buffer = (self._next_buffer + 1) % BUFFERS
            part = slice(item.begun, item.begun + len(bytes_) // item.grad.itemsize)
            source = item.grad[part]
            buffer = bytes_[: source.nbytes].view(source.dtype)
            op = self._backend.grad_offload(buffer, source, item.after)
        except BaseException as error:
            item.error = item.error or error
            return _Tile(item, None)
        item.begun += source.numel()
        return _Tile(item, op, item.kept[part], buffer, item.begun >= item.grad.numel())

    @torch.no_grad()
    def _finish(self, tile: _Tile) -> None:
        item = tile.item
        try:
            if tile.op is not None:
                tile.op.wait()
            if tile.into is not None and item.error is None:
                assert tile.buffer is not None
                _store(tile.into, tile.buffer, item.add)
        except BaseException as error:
            item.error = item.error or error
        tile.op = tile.into = tile.buffer = None  # the pin ends before the waiting thread goes on
        if tile.last:
            with self._changed:
                self._end(item)

    def _end(self, item: _Item) -> None:
        """Needs the lock."""
        nbytes = item.grad.nbytes
        del item.grad, item.kept
        item.op = None
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
            for op in [tile.op for tile in self._ahead] + [item.op for item in self._queue]:
                if op is not None:
                    op.cancel()
        self._worker.close()


def _store(into: torch.Tensor, values: torch.Tensor, add: bool) -> None:
    """Copies or adds values of perhaps another dtype, in the calling thread."""
    # (A function of its own: its variables are pins, which end before anybody is told.)
    parts = zip(into.split(_SERIAL_NUMEL), values.split(_SERIAL_NUMEL), strict=True)
    for to, part in parts:
        if add:
            to.add_(part)
        else:
            to.copy_(part)
