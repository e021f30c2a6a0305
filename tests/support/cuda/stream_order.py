"""Which uses of memory come after which others, whatever a device does first."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

HOST = "host"  # waits for streams, and gives them all their work
Clock = dict[Hashable, int]  # of each stream, up to which of its uses
_Range = tuple[int, int, bool]  # from one address to another, and whether it is written


class StreamOrder:
    """Fails for two uses of the same bytes, one of which writes, that nothing orders.

    Uses of one stream are in order. Those of two are only if the later one's stream was told to
    wait for an event that was recorded after the earlier one, or the host has waited for it: then
    all that streams are given afterwards comes later.
    """

    def __init__(self) -> None:
        self._clocks: dict[Hashable, Clock] = {HOST: {}}
        # By stream, the last use of each range that the host does not know to have ended, the
        # oldest first: of many uses a new one is compared with the few that are unknown to it.
        self._uses: dict[Hashable, dict[_Range, int]] = {}

    def now(self, stream: Hashable) -> Clock:
        """What comes before an event that is recorded in the stream now."""
        return dict(self._clock(stream))

    def after(self, waiting: Hashable, clock: Clock) -> None:
        """What `waiting`, a stream or the HOST, does from now on comes after what `clock` has."""
        _merge(self._clock(waiting), clock)
        if waiting is HOST:
            for stream, uses in self._uses.items():
                ended = clock.get(stream, 0)
                for used, number in list(uses.items()):
                    if number > ended:
                        break
                    del uses[used]

    def use(self, stream: Hashable, ranges: Iterable[tuple[int, int]], *, writes: bool) -> None:
        """The stream is given a use of ranges, addresses and bytes."""
        clock = self._clock(stream)
        _merge(clock, self._clocks[HOST])
        number = clock[stream] = clock.get(stream, 0) + 1
        for begin, nbytes in ranges:
            if not nbytes:
                continue
            end = begin + nbytes
            for other, uses in self._uses.items():
                if other is stream:
                    continue
                known = clock.get(other, 0)
                for (first, last, written), used_at in reversed(uses.items()):
                    if used_at <= known:
                        break
                    if first < end and begin < last and (writes or written):
                        raise AssertionError(
                            "two streams use the same memory, and none waits for the other's event"
                        )
            mine = self._uses.setdefault(stream, {})
            mine.pop((begin, end, writes), None)  # so that it is the newest
            mine[begin, end, writes] = number

    def forget(self, begin: int, nbytes: int) -> None:
        """The memory is another's now, who knows when it was used last."""
        for uses in self._uses.values():
            for used in [u for u in uses if u[0] < begin + nbytes and begin < u[1]]:
                del uses[used]

    def _clock(self, stream: Hashable) -> Clock:
        return self._clocks.setdefault(stream, {})


def _merge(into: Clock, clock: Clock) -> None:
    for stream, number in clock.items():
        into[stream] = max(into.get(stream, 0), number)
