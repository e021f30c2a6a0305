"""The order in which chunks are used, learned from the last step, to know the next uses.

This is the seam for a traced planner: whatever knows the future of a step better replaces it.
"""

from __future__ import annotations

from bisect import bisect_left

_MOST_USES = 1 << 14  # of one step; more are taken for several, as of inference that has no steps


class UseOrder:
    """Remembers one step's sequence of uses and follows it through the next.

    A step that deviates costs a worse guess, never an error.
    """

    def __init__(self) -> None:
        self._known: list[int] = []
        self._uses: dict[int, list[int]] = {}  # chunk -> positions in _known, ascending
        self._position = 0  # in _known: the next use expected
        self._recording: list[int] = []

    def note(self, chunk: int) -> None:
        """`chunk` is used now. Repeated uses in a row count once."""
        if self._recording and self._recording[-1] == chunk:
            return
        if len(self._recording) == _MOST_USES:
            self.end_step()
        self._recording.append(chunk)
        distance = self._distance(chunk)
        if distance is not None:
            self._position = (self._position + distance + 1) % len(self._known)

    def end_step(self) -> None:
        """A step is over: what was recorded is what the next one is expected to do.

        Idempotent; a step without any use is none.
        """
        if not self._recording:
            return
        self._known, self._recording = self._recording, []
        self._position = 0
        self._uses = {}
        for position, chunk in enumerate(self._known):
            self._uses.setdefault(chunk, []).append(position)

    def _distance(self, chunk: int) -> int | None:
        positions = self._uses.get(chunk)
        if not positions:
            return None
        index = bisect_left(positions, self._position)
        if index < len(positions):
            return positions[index] - self._position
        return positions[0] + len(self._known) - self._position

    def next_use(self, chunk: int) -> int:
        """How many uses from now `chunk` is needed; a large number if it is not known to be."""
        distance = self._distance(chunk)
        return len(self._known) + 1 if distance is None else distance

    def upcoming(self, count: int) -> list[int]:
        """The next `count` different chunks expected, nearest first."""
        found: list[int] = []
        for step in range(len(self._known)):
            chunk = self._known[(self._position + step) % len(self._known)]
            if chunk not in found:
                found.append(chunk)
                if len(found) in (count, len(self._uses)):
                    break
        return found
