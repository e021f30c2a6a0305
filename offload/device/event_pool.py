"""Events of a device that are used again, because making one takes a call of the driver."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any


class Event:
    """A point in a stream, which was recorded once. Its memory goes back when nobody has it.

    Whoever is going to wait for the point, or to ask for it, has this object until then. A wait
    that a stream was given is no reason to keep it: streams wait for what was recorded when they
    were told to, and not for what is recorded later (cudaEventRecord() says so). So the device's
    event can be recorded anew as soon as this object is gone, whether the point has come or not.
    """

    __slots__ = ("__weakref__", "_free", "raw")

    def __init__(self, raw: Any, free: deque[Any]) -> None:
        """`raw` is the device's event, which goes to `free` in the end."""
        self.raw = raw
        self._free = free

    def __del__(self) -> None:
        self._free.append(self.raw)


class EventPool:
    """Gives events out, as many at a time as are wanted, and makes only those that it lacks.

    Any thread may use it, the garbage collector in the middle of a call, too.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        """`make` makes an event of the device."""
        self._make = make
        self._free: deque[Any] = deque()  # whose append() and pop() need no lock

    def take(self) -> Event:
        """An event that nobody else has; the caller records it."""
        try:
            raw = self._free.pop()
        except IndexError:
            raw = self._make()
        return Event(raw, self._free)
