"""Where chunks are in RAM on their way to the device, and who holds them there."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from offload.cache.slot_cache import SlotCache
from offload.disk.backing import Operation

_POLL_S = 0.0005


class Staged:
    """A chunk's bytes in RAM, or on their way there; pinned as long as `flat` lives."""

    def __init__(
        self,
        flat: torch.Tensor,
        op: Operation | None = None,
        settle: Callable[[], object] | None = None,
    ) -> None:
        """`op` brings the bytes (None: they are there); `settle` is called after it."""
        self.flat = flat
        self._op = op
        self._settle = settle

    @property
    def ready(self) -> bool:
        """Whether the bytes need not be waited for."""
        return self._op is None

    def wait(self) -> None:
        """Until the bytes are there. Raises what bringing them raises."""
        if self._op is None:
            return
        try:
            self._op.wait()
        finally:
            if self._settle is not None:
                self._settle()

    def cancel(self) -> None:
        """Nobody wants the bytes any more: wait() may end early, with an error."""
        if self._op is not None:
            self._op.cancel()


class Source(Protocol):
    """Brings chunks to RAM. Any thread may use it."""

    def home(self, chunk: int) -> torch.Tensor | None:
        """The chunk, flat, if it is in RAM for good."""

    def start(self, chunk: int) -> Staged | None:
        """Starts bringing the chunk; None if pins leave no room now.

        Raises what starting raises. Does not wait for transfers of what is pinned.
        """

    def no_room(self, chunk: int) -> Exception:
        """The error that says so, with numbers, for who cannot wait any longer."""


class SharedCache:
    """A SlotCache that several threads use."""

    def __init__(self, cache: SlotCache, dtype: torch.dtype, patience_s: float = 0.0) -> None:
        """`patience_s`: how long a pin waits for room that other threads take.

        For room that is taken by what start() gave it waits anyway: that ends by itself.
        """
        self._cache = cache
        self._dtype = dtype
        self._patience_s = patience_s
        self._lock = threading.RLock()  # for the state of slots; not for the bytes in them
        # What start() gave and is still held, only as long as it is copied.
        self._staged: weakref.WeakSet[Staged] = weakref.WeakSet()

    def start(self, chunk: int) -> Staged | None:
        """As Source says."""
        with self._lock:
            if not self._cache.has_room(chunk):
                return None
            op = self._cache.start(chunk)
            flat = self._cache.tensor(chunk, self._dtype)
            staged = Staged(flat, op, None if op is None else lambda: self._settle(chunk, op))
            self._staged.add(staged)
            return staged

    def no_room(self, chunk: int) -> Exception:
        """As Source says."""
        with self._lock:
            return self._cache.no_room(chunk)

    def _settle(self, chunk: int, op: Operation) -> None:
        with self._lock:
            self._cache.note_done(chunk, op)

    def get(self, chunk: int) -> torch.Tensor:
        """A pin on the chunk's bytes, when they are there. Raises as SlotCache.get()."""
        return self._pin(chunk, self._cache.get)

    def create(self, chunk: int) -> torch.Tensor:
        """A pin on slots for the chunk's new bytes; call changed() when they are there."""
        return self._pin(chunk, self._cache.create)

    def _pin(self, chunk: int, bring: Callable[[int], None]) -> torch.Tensor:
        deadline_s = time.monotonic() + self._patience_s
        while True:
            with self._lock:
                patient = self._staged or time.monotonic() < deadline_s
                if self._cache.has_room(chunk) or not patient:
                    bring(chunk)
                    return self._cache.tensor(chunk, self._dtype)
            time.sleep(_POLL_S)  # other threads are using the slots

    def changed(self, chunk: int) -> None:
        """The bytes that are pinned were changed; returns when they are home."""
        with self._lock:
            self._cache.dirty(chunk)
            self._cache.write_back(chunk)
            self._cache.get(chunk)

    def drop(self, chunk: int) -> None:
        """Forgets the copy."""
        with self._lock:
            self._cache.drop(chunk)

    def settle(self) -> None:
        """Waits for all transfers under way. Raises what one met."""
        with self._lock:
            self._cache.settle()

    def clear(self) -> None:
        """Forgets all copies. Raises what a transfer met."""
        with self._lock:
            self._cache.clear()

    def refit(self) -> None:
        """The arena was resized while no copy was held."""
        with self._lock:
            self._cache.refit()
