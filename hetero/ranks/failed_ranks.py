"""What ranks know of each other's end: which failed, why, and how this one tells that it does.

Under each communicator's prefix in torch.distributed's store a rank that ends puts how many common
operations it has made, and why it makes no more: an exception that nothing caught, close(), or the
end of its program. A wait of another rank is in vain if it is for an operation beyond that number;
what was made before still arrives. A rank that an exception ends also breaks off its connections,
at which all waits for it end at once, in other threads, too. Where the store is gone with its
process, the broken connection still names the rank.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from offload.errors import PeerError

_LONGEST_CAUSE = 1000  # characters of an error that is told to other ranks


class Connections(Protocol):
    """What connects this rank with others: a Communicator."""

    def tell_end(self, why: str, answers: bool = False) -> None:
        """Tells the others that this rank makes no more common operations, and why.

        `answers`: it goes on answering requests until they have ended, too.
        """

    def break_off(self) -> None:
        """Ends all transfers and waits, here and on the other ranks."""


class FailedRanks:
    """The ranks that are known to have failed, the first to be known first.

    All communicators of an engine share one, so that errors can name the first cause, and so that
    this rank's end ends all of its connections.

    Attributes:
        attempt: how many calls of initialize() the ranks have made. What a rank told in an earlier
            one, which failed, says nothing about this one.
        own_end: why this rank has broken off its connections; None while it has not.
    """

    def __init__(self) -> None:
        self.attempt = 0
        self.own_end: str | None = None
        self._lock = threading.Lock()
        self._why: dict[int, str] = {}
        self._connections: weakref.WeakSet[Connections] = weakref.WeakSet()

    def note(self, rank: int, why: str) -> None:
        """Notes that rank `rank` (in the world) failed; `why` is a sentence for an error."""
        with self._lock:
            self._why.setdefault(rank, why)

    @property
    def first(self) -> tuple[int, str] | None:
        """The rank that was the first to be known, and why it failed; None if none failed."""
        with self._lock:
            return next(iter(self._why.items()), None)

    def check(self) -> None:
        """Raises PeerError if a rank has failed."""
        if self.first is not None:
            raise PeerError(self.first[1])

    def add(self, connections: Connections) -> None:
        """These end with the others."""
        self._connections.add(connections)

    def tell(self, why: str, answers: bool = False) -> None:
        """Tells the other ranks that this one makes no more common operations, and why.

        `answers`: it goes on answering requests until they have ended, too.
        """
        for connections in list(self._connections):
            connections.tell_end(why, answers)

    def end(self, why: str) -> None:
        """Tells the other ranks that this one ends, and breaks off all connections; idempotent.

        Every wait for another rank ends, here at once and there when the connection breaks.
        """
        if self.own_end is None:
            self.own_end = why
            self.tell(why)
        for connections in list(self._connections):
            connections.break_off()


def name_error(error: BaseException) -> str:
    """The error's class and text, as other ranks are told them."""
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    return text if len(text) <= _LONGEST_CAUSE else f"{text[:_LONGEST_CAUSE]}..."
