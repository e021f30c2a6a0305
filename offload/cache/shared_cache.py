"""A cache in RAM that several threads use, for chunks on their way to a device or to ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from offload.cache.slot_cache import SlotCache, WriteBackCache
from offload.memory.operation import Operation


class HostCopy:
    """A chunk's bytes in RAM, or on their way there; its slots are pinned until release().

    SharedCache.start() makes it.
    """

    def __init__(self, cache: SharedCache, chunk: int, op: Operation | None) -> None:
        """`op` brings the bytes; None if they are there."""
        self._cache = cache
        self._chunk = chunk
        self.op = op
        self._pin: torch.Tensor | None
        self.flat, self._pin = cache.views(chunk)

    def wait(self) -> None:
        """Until the bytes are there. Raises what bringing them raises."""
        if self.op is not None:
            try:
                self.op.wait()
            finally:
                self._cache.note_done(self._chunk, self.op)

    def cancel(self) -> None:
        """The bytes are not needed: wait() may end early, with an error."""
        if self.op is not None:
            self.op.cancel()

    def release(self) -> None:
        """Ends the pin; `flat` must not be used any more. Idempotent."""
        if self._pin is not None:
            self._pin = None
            self._cache.note_released(self)


class SharedCache:
    """A SlotCache that several threads use, each for as long as it says.

    The views that it gives are no pins; the pin ends at a known time, so that a thread that waits
    for room can be told.
    """

    def __init__(self, cache: SlotCache, dtype: torch.dtype, patience_s: float = 0.0) -> None:
        """`patience_s`: how long open() and fill() wait for room that other threads take.

        For room that copies from start() take they wait anyway: those end by themselves.
        """
        self._cache = cache
        self._dtype = dtype
        self._patience_s = patience_s
        # Reentrant. Guards the state of slots, not the bytes in them; told when a pin ends.
        self._changed = threading.Condition()
        self._started: set[HostCopy] = set()  # what start() gave and is not released

    def start(self, chunk: int) -> HostCopy | None:
        """Starts bringing the chunk to RAM; the caller releases the copy.

        None if pins leave no room now. Raises an OSError if it cannot be started.
        """
        with self._changed:
            if not self._cache.has_room(chunk):
                return None
            copy = HostCopy(self, chunk, self._cache.start(chunk))
            self._started.add(copy)
            return copy

    def open(self, chunk: int) -> AbstractContextManager[torch.Tensor]:
        """The chunk's bytes, flat, inside the block.

        Raises BudgetError if there is no room and none comes in time, and an OSError if they cannot
        be read.
        """
        return self._pinned(chunk, self._cache.get)

    @contextmanager
    def _pinned(self, chunk: int, bring: Callable[[int], None]) -> Iterator[torch.Tensor]:
        give_up_s = time.monotonic() + self._patience_s
        with self._changed:
            while not self._cache.has_room(chunk):
                left_s = give_up_s - time.monotonic()
                if not self._started and left_s <= 0:
                    break  # bring() raises what is to be said
                self._changed.wait(None if self._started else left_s)
            bring(chunk)
            flat, pin = self.views(chunk)
        try:
            yield flat
        finally:
            with self._changed:
                del pin
                self._changed.notify_all()

    def drop(self, chunk: int) -> None:
        """Forgets the copy."""
        with self._changed:
            self._cache.drop(chunk)

    def no_room(self, chunk: int) -> Exception:
        """The error that says that pins leave no room for the chunk, with numbers."""
        with self._changed:
            return self._cache.no_room(chunk)

    def views(self, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For HostCopy: the chunk's bytes, flat, and a pin on them, which is a tensor, too."""
        with self._changed:
            pin = self._cache.tensor(chunk, self._dtype)
            return self._cache.tensor(chunk, self._dtype, pinned=False), pin

    def note_done(self, chunk: int, op: Operation) -> None:
        """For HostCopy: the operation that brings the chunk was waited for."""
        with self._changed:
            self._cache.note_done(chunk, op)

    def note_released(self, copy: HostCopy) -> None:
        """For HostCopy: its pin has ended."""
        with self._changed:
            self._started.discard(copy)
            self._changed.notify_all()

    def finish_transfers(self) -> None:
        """Waits for all transfers under way. Raises what one met."""
        with self._changed:
            self._cache.finish_transfers()

    def clear(self) -> None:
        """Forgets all copies. Raises what a transfer met."""
        with self._changed:
            self._cache.clear()

    def refit(self) -> None:
        """The arena was resized while no copy was held."""
        with self._changed:
            self._cache.refit()


class SharedWriteBackCache(SharedCache):
    """A SharedCache of chunks that change in their slots."""

    _cache: WriteBackCache

    def fill(self, chunk: int) -> AbstractContextManager[torch.Tensor]:
        """Flat memory for the chunk's new bytes; call changed() in the block when they are there.

        Raises BudgetError if there is no room and none comes in time.
        """
        return self._pinned(chunk, self._cache.create)

    def changed(self, chunk: int) -> None:
        """The bytes that open() or fill() gave were changed; returns when they are home."""
        with self._changed:
            self._cache.dirty(chunk)
            self._cache.write_back(chunk)
            self._cache.get(chunk)
