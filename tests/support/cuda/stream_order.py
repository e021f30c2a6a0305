"""Which uses of memory come after which others, whatever a device does first."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

HOST = "host"  # waits for streams, and gives them all their work
Clock = dict[Hashable, int]  # of each stream, up to which of its uses


@dataclass(frozen=True)
class _Use:
    stream: Hashable
    number: int
    begin: int
    end: int
    writes: bool


class StreamOrder:
    """Fails for two uses of the same bytes, one of which writes, that nothing orders.

    Uses of one stream are in order. Those of two are only if the later one's stream was told to
    wait for an event that was recorded after the earlier one, or the host has waited for it: then
    all that streams are given afterwards comes later.
    """

    def __init__(self) -> None:
        self._clocks: dict[Hashable, Clock] = {HOST: {}}
        self._uses: list[_Use] = []  # that the host does not know to have ended

    def now(self, stream: Hashable) -> Clock:
        """What comes before an event that is recorded in the stream now."""
        return dict(self._clock(stream))

    def after(self, waiting: Hashable, clock: Clock) -> None:
        """What `waiting`, a stream or the HOST, does from now on comes after what `clock` has."""
        _merge(self._clock(waiting), clock)
        if waiting is HOST:
            self._uses = [use for use in self._uses if not _has(clock, use)]

    def use(self, stream: Hashable, ranges: Iterable[tuple[int, int]], *, writes: bool) -> None:
        """The stream is given a use of ranges, addresses and bytes."""
        clock = self._clock(stream)
        _merge(clock, self._clocks[HOST])
        number = clock[stream] = clock.get(stream, 0) + 1
        for begin, nbytes in ranges:
            found = _Use(stream, number, begin, begin + nbytes, writes)
            for other in self._uses:
                meet = other.begin < found.end and begin < other.end
                if meet and (writes or other.writes):
                    assert _has(clock, other), (
                        "two streams use the same memory, and none waits for the other's event"
                    )
            if nbytes:
                self._uses.append(found)

    def _clock(self, stream: Hashable) -> Clock:
        return self._clocks.setdefault(stream, {})


def _has(clock: Clock, use: _Use) -> bool:
    return clock.get(use.stream, 0) >= use.number


def _merge(into: Clock, clock: Clock) -> None:
    for stream, number in clock.items():
        into[stream] = max(into.get(stream, 0), number)
