"""A store of torch.distributed whose waits end when ranks will never be connected."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

_FIRST_POLL_S, _POLL_S = 0.01, 0.1


class PolledStore(Store):
    """Another store, but a wait for a key is a loop here that asks for it.

    torch.distributed's stores wait in C++, where nothing ends them; and a TCPStore that waits for
    one thread lets no other thread ask for anything, until the time limit. gloo's process groups
    look up this object whenever they use the store, so it must live as long as they do.
    """

    def __init__(self, store: Any, timeout_s: float, look: Callable[[], None]) -> None:
        """Asks `store`. A wait calls `look` meanwhile; what this raises ends the wait."""
        super().__init__()
        self._store = store
        self._timeout_s = timeout_s
        self._look = look
        self._has_ended = False

    def connected(self) -> None:
        """All ranks are connected: nothing is to be looked at any more, or kept for that."""
        self._look = _nothing

    def end(self) -> None:
        """Ends all waits, which raise RuntimeError."""
        self._has_ended = True

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all keys are there.

        Raises RuntimeError after the time limit or end(), and what the look raises.
        """
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        started, poll_s = time.monotonic(), _FIRST_POLL_S
        while not self._store.check(list(keys)):
            if self._has_ended:
                raise RuntimeError("the wait was ended")
            self._look()
            if time.monotonic() - started > timeout_s:
                raise RuntimeError(f"timed out after {timeout_s:g} s")
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _POLL_S)

    def get(self, key: str) -> bytes:
        """The value of the key; waits until it is there."""
        self.wait([key])
        value: bytes = self._store.get(key)
        return value

    # What does not wait

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check(list(keys)))

    def add(self, key: str, value: int) -> int:
        return int(self._store.add(key, value))


def _nothing() -> None:
    """What is looked at when all ranks are connected."""
