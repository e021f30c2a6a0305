"""What other ranks have told about the all-gathers that all ranks make."""

from __future__ import annotations

import threading

from offload.errors import PeerError


class GatherNews:
    """Notes of the threads that answer other ranks' requests.

    Attributes:
        wanted: so many all-gathers have been started by a rank that waits for this one.
    """

    def __init__(self) -> None:
        self.wanted = 0
        self._lock = threading.Lock()
        self._failures: dict[int, str] = {}  # by the all-gather's number

    def want(self, gathers: int) -> None:
        """A rank waits for one of the first so many all-gathers."""
        with self._lock:
            self.wanted = max(self.wanted, gathers)

    def fail(self, gather: int, why: str) -> None:
        """A rank has no values for an all-gather, in which it takes part nevertheless."""
        with self._lock:
            self._failures[gather] = why

    def failure_of(self, gather: int) -> PeerError | None:
        """The error of an all-gather in which a rank had no values; None if all had."""
        with self._lock:
            why = self._failures.pop(gather, None)
        return None if why is None else PeerError(why)
