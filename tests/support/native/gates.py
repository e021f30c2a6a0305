"""Transfers that a test holds back, so that none depends on how long a transfer takes."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from offload.cache.slot_cache import Transfers
from offload.device.backend import EmulatedBackend
from tests.support.waiting import PATIENCE_S


class HeldOp:
    """A transfer that starts when its gate opens, unless it is cancelled before."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._decided = threading.Event()  # started, failed to start, or cancelled
        self._op: Any = None
        self._error: OSError | None = None

    def release(self) -> None:
        """Starts it, once, if it was not cancelled."""
        with self._lock:
            if self._decided.is_set():
                return
            try:
                self._op = self._start()
            except OSError as error:
                self._error = error
            self._decided.set()

    def done(self) -> bool:
        """Whether wait() would return or raise at once."""
        return self._decided.is_set() and (self._op is None or self._op.done())

    def wait(self) -> None:
        """As the transfer's; OSError of ECANCELED if it never started."""
        assert self._decided.wait(PATIENCE_S), "the gate was never opened"
        if self._error is not None:
            raise self._error
        self._op.wait()

    def hurry(self) -> None:
        """Nothing: when it starts is the test's."""

    def cancel(self) -> None:
        """As the transfer's."""
        with self._lock:
            if not self._decided.is_set():
                self._error = OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
                self._decided.set()
                return
        if self._op is not None:
            self._op.cancel()


class Gate:
    """Open at first. While it is closed, transfers that would start wait for it to open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._held: list[HeldOp] = []

    def start(self, start: Callable[[], Any]) -> Any:
        """start()'s result, or what stands for it while the gate is closed."""
        with self._lock:
            if self._closed:
                self._held.append(HeldOp(start))
                return self._held[-1]
        return start()

    @property
    def held(self) -> int:
        """How many transfers came to the closed gate."""
        with self._lock:
            return len(self._held)

    def open(self) -> None:
        """Starts what is held, in the order in which it came."""
        with self._lock:
            self._closed = False
            held, self._held = self._held, []
            for op in held:
                op.release()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Within, transfers are held; they start at its end, or at open()."""
        with self._lock:
            self._closed = True
        try:
            yield
        finally:
            self.open()


class GatedTransfers(Transfers):
    """Transfers of a scratch file whose reads pass a gate."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gate = Gate()

    def read(self, *arguments: Any) -> Any:
        """As Transfers."""
        return self.gate.start(lambda: super(GatedTransfers, self).read(*arguments))


class GatedBackend(EmulatedBackend):
    """An emulated device whose copies, both ways, pass a gate."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__(bytes_per_s)
        self.gate = Gate()

    def fetch(self, to: torch.Tensor, source: torch.Tensor) -> Any:
        """As EmulatedBackend."""
        return self.gate.start(lambda: super(GatedBackend, self).fetch(to, source))

    def to_ram(self, to: torch.Tensor, source: torch.Tensor, streams: Any = None) -> Any:
        """As EmulatedBackend."""
        return self.gate.start(lambda: super(GatedBackend, self).to_ram(to, source, streams))

    def offload(self, *arguments: Any) -> Any:
        """As EmulatedBackend."""
        return self.gate.start(lambda: super(GatedBackend, self).offload(*arguments))
