"""Gradients on their way from the device to where they are kept in RAM.

A gradient that is the first of its step and has the kept dtype is copied straight to its home,
whole. One that is added or converted passes in parts through buffers in RAM, where it is added in
fp32 and rounded once, so with the same bits. A thread starts the copies of parts, as many ahead as
there are buffers, waits for each, and has the native core add it, which takes the idle threads of
the worker pool. Parts are so large that what Python does for one is little beside that. Bytes under
way are charged to DEVICE and limited. Code that reads a kept gradient waits for what is on its way
to it, and gets the error if that was lost.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from offload import _native
from offload.device.backend import Backend
from offload.errors import BudgetError, HeteroError
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.operation import Transfer, Worker, cancelled
from offload.memory.sizes import PAGE_BYTES, format_bytes, round_up
from offload.memory.tiers import Account, Tier

if TYPE_CHECKING:
    from offload._native import DtypeName

_DTYPE_NAMES: dict[torch.dtype, DtypeName] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
BUFFERS = 2  # in RAM at most, each for a part of a gradient that is on its way
_MOST_BUFFER_BYTES = 4 << 20


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
    after: Any  # the device's event after which it is computed
    op: Transfer | None = None  # of one that is copied straight to its place
    error: BaseException | None = None


@dataclass(eq=False)
class _Part:
    """Some elements of a gradient that passes through buffers."""

    item: _Item
    elements: slice
    buffer: torch.Tensor | None = None
    op: Transfer | None = None  # brings them to the buffer
    error: BaseException | None = None  # that kept the transfer from being started


class _Passage:
    """Brings gradients through buffers, part by part, and adds or converts them in RAM.

    Parts are copied to as many buffers as there are, also those of later gradients, while the first
    one is added.
    """

    def __init__(self, backend: Backend, buffers: HostArena) -> None:
        self._backend = backend
        self._buffers = buffers
        # Reentrant: the garbage collector may close what it finds at any time.
        self._lock = threading.RLock()  # guards all below
        self._parts: deque[_Part] = deque()  # that are not at their places, in their order
        self._next_buffer = 0
        self._is_cancelled = False

    def add(self, item: _Item) -> None:
        """It is brought after those that were added before."""
        numel = self._buffers.slot_bytes // item.grad.itemsize
        begins = range(0, len(item.grad), numel)
        with self._lock:
            self._parts += [_Part(item, slice(begin, begin + numel)) for begin in begins]

    def bring(self, item: _Item) -> None:
        """Until `item`, the first one that was added, is at its place, or no part of it is on its
        way any more. Raises what kept a part from arriving."""
        error: BaseException | None = None
        while (part := self._first(item, error is not None)) is not None:
            try:
                if part.op is None:
                    raise part.error or cancelled()
                part.op.wait()
                if error is None:
                    _put(part)
            except BaseException as found:
                error = error or found
            with self._lock:
                self._parts.popleft()
        if error is not None:
            raise error

    def _first(self, item: _Item, is_lost: bool) -> _Part | None:
        """The first part of `item` that is left, after the next copies were started."""
        with self._lock:
            if is_lost:  # what is not on its way does not matter
                left = (p for p in self._parts if p.item is not item or p.op is not None)
                self._parts = deque(left)
            for part in islice(self._parts, self._buffers.slots):
                if part.error is not None or self._is_cancelled:
                    break
                if part.op is None:
                    try:
                        self._start(part)
                    except BaseException as error:
                        part.error = error
                        break
            first = self._parts[0] if self._parts else None
            return first if first is not None and first.item is item else None

    def _start(self, part: _Part) -> None:
        """Needs the lock."""
        grad = part.item.grad[part.elements]
        buffer = self._buffers.view(self._next_buffer, 1, torch.uint8)[: grad.nbytes]
        part.buffer = buffer.view(grad.dtype)
        part.op = self._backend.to_ram(part.buffer, grad, part.item.after)
        self._next_buffer = (self._next_buffer + 1) % self._buffers.slots

    def cancel(self) -> None:
        """What is not at its place is not needed."""
        with self._lock:
            self._is_cancelled = True
            for part in self._parts:
                if part.op is not None:
                    part.op.cancel()


def _put(part: _Part) -> None:
    """Brings a part from its buffer to its place."""
    buffer, kept = part.buffer, part.item.kept[part.elements]
    assert buffer is not None
    write = _native.add_and_sum if part.item.add else _native.copy_and_sum
    names = _DTYPE_NAMES[buffer.dtype], _DTYPE_NAMES[kept.dtype]
    write(names[0], buffer.data_ptr(), names[1], kept.data_ptr(), len(buffer))


class GradOffload:
    """Copies gradients to where they are kept, or adds them to what is there, in another thread.

    Gradients of one owner arrive in the order in which they were given. Callers that read what is
    kept call wait() first, which raises an error until the owner's gradient is replaced.

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
        self._passage = _Passage(backend, buffers)
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
            straight = not add and grad.dtype is kept.dtype and len(grad) > 0
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
            try:
                if self._closing:
                    raise HeteroError("the engine was closed")
                item = _Item(owner, grad, kept, add, self._backend.record_event())
                if straight:
                    item.op = self._backend.to_ram(kept, grad, item.after)
                self._worker.do(self._finish_next)
            except BaseException:
                self._ledger.release(Tier.DEVICE, Account.GRAD_SLOT, grad.nbytes)
                raise
            self._in_flight_bytes += grad.nbytes
            self._pending[owner] = self._pending.get(owner, 0) + 1
            self._queue.append(item)
            if not straight:
                self._passage.add(item)

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
            if item.op is not None:
                item.op.wait()
            else:
                self._passage.bring(item)
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
        self._passage.cancel()
        self._worker.close()


def _plain(grad: torch.Tensor) -> torch.Tensor:
    """A tensor of the same values, which are in its memory one after another."""
    if grad.is_neg() or grad._is_zerotensor():  # the memory has other values, or there is none
        grad = grad.clone()
    return grad.contiguous()
