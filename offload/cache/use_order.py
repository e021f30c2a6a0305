"""The order in which chunks are used, learned from steps that were made, to know the next uses.

Several sequences are known side by side (training, evaluation, another length), each by itself; the
one that the step at hand has followed best so far tells what comes next.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import groupby

NEVER = 1 << 62  # the next use of a slot that holds nothing
UNKNOWN = 1 << 61  # the next use of a chunk that the expected step does not use

_MOST_USES = 1 << 14  # of one step; more are taken for several, as of inference that has no steps
_ENOUGH_TIMES = 4
_MOST_SEQUENCES = 4  # known at once; following one costs about a microsecond a use
_MOST_PASSED = 256  # uses that one use may skip before all next uses are looked up again


class _Sequence:
    """The uses of one step, and how far the step at hand has followed them."""

    def __init__(self, uses: Sequence[int], times_seen: int = 1) -> None:
        self.uses = tuple(uses)
        self.times_seen = times_seen
        self.followed = 0  # uses that came as expected, less those that did not
        self.passed = 0  # uses that lie behind the step at hand, made or skipped, in all rounds
        self._position = 0  # the next use expected
        self._at: dict[int, list[int]] = {}  # chunk -> positions, ascending
        for position, chunk in enumerate(self.uses):
            self._at.setdefault(chunk, []).append(position)

    def rewind(self) -> None:
        self._position = self.followed = 0

    def note(self, chunk: int) -> range:
        """Follows a use. Returns the positions that are passed by it, modulo the uses."""
        distance = self.distance(chunk)
        self.followed += 1 if distance == 0 else -1
        if distance is None:
            return range(0)
        passed = range(self._position, self._position + distance + 1)
        self._position = passed.stop % len(self.uses)
        self.passed += len(passed)
        return passed

    def distance(self, chunk: int) -> int | None:
        positions = self._at.get(chunk)
        if not positions:
            return None
        index = bisect_left(positions, self._position)
        if index < len(positions):
            return positions[index] - self._position
        return positions[0] + len(self.uses) - self._position

    def upcoming(self, count: int) -> list[int]:
        found: dict[int, None] = {}
        step = 0
        while len(found) < min(count, len(self._at)):
            found[self.uses[(self._position + step) % len(self.uses)]] = None
            step += 1
        return list(found)


class UseOrder:
    """Remembers sequences of uses, one per step, and follows them through the next.

    A step that deviates costs a worse guess, never an error.
    """

    def __init__(self) -> None:
        self._known: list[_Sequence] = []  # the last seen first
        self._best: _Sequence | None = None
        self._recording: list[int] = []
        self._generation = 0  # of next uses: in another one all of them may be different
        self._moved: list[int] = []  # chunks whose next use has changed within the generation
        self._in_place: frozenset[int] = frozenset()  # chunks that are not gathered

    def note(self, chunk: int) -> None:
        """`chunk` is used now. Repeated uses in a row count once."""
        if self._recording and self._recording[-1] == chunk:
            return
        if len(self._recording) == _MOST_USES:
            self.end_step()
        self._recording.append(chunk)
        for sequence in self._known:
            passed = sequence.note(chunk)
            if sequence is self._best:
                self._note_moved(sequence, passed)
        if len(self._known) > 1:
            best = self._best
            self._choose()
            if self._best is not best:
                self._begin_generation()

    def _note_moved(self, sequence: _Sequence, passed: range) -> None:
        if len(passed) > _MOST_PASSED or len(self._moved) > _MOST_USES:
            self._begin_generation()
        else:
            uses = sequence.uses
            self._moved += [uses[position % len(uses)] for position in passed]

    def _begin_generation(self) -> None:
        self._generation += 1
        self._moved = []

    def end_step(self) -> None:
        """A step is over: the next one is expected to do the same, or what an earlier one did.

        Idempotent; a step without any use is none.
        """
        if not self._recording:
            return
        uses, self._recording = tuple(self._recording), []
        self._learn(uses)
        for sequence in self._known:
            sequence.rewind()
        self._choose()
        self._begin_generation()

    def use_in_place(self, chunks: Collection[int]) -> None:
        """These, and no others, are never gathered from now on: nothing expects them any more."""
        self._in_place = frozenset(chunks)
        known, self._known = self._known, []
        for sequence in reversed(known):
            self._learn(sequence.uses, sequence.times_seen)
        self._choose()
        self._begin_generation()

    def _learn(self, uses: tuple[int, ...], times_seen: int = 1) -> None:
        if self._in_place:
            rest = [chunk for chunk in uses if chunk not in self._in_place]
            uses = tuple(chunk for chunk, _ in groupby(rest))  # repeated uses count once
            if not uses:
                return
        seen = next((s for s in self._known if s.uses == uses), None)
        if seen is None:
            self._known.insert(0, _Sequence(uses, times_seen))
            del self._known[_MOST_SEQUENCES:]
        else:
            # Counted to a few: what was done a thousand times may be over for good.
            seen.times_seen = min(seen.times_seen + times_seen, _ENOUGH_TIMES)
            self._known.remove(seen)
            self._known.insert(0, seen)

    def _choose(self) -> None:
        """The one followed best; of equals the one seen most often, then the last seen."""
        self._best = max(self._known, key=lambda s: (s.followed, s.times_seen), default=None)

    def next_use_number(self, chunk: int) -> int:
        """The number of the chunk's next use, counted from the beginning of the generation.

        It stays the same until the use is made or skipped (see moved()). UNKNOWN if none is
        expected; larger than the number of every use that is.
        """
        if self._best is None:
            return UNKNOWN
        distance = self._best.distance(chunk)
        return UNKNOWN if distance is None else self._best.passed + distance

    def moved(self) -> tuple[int, Sequence[int]]:
        """What has changed in next_use_number(), for who keeps its results.

        The number of the generation, and the chunks whose next use has changed since it began, in
        the order of these changes; a chunk may be there several times. The list only grows until
        another generation begins, in which all next uses may be different.
        """
        return self._generation, self._moved

    def upcoming(self, count: int) -> list[int]:
        """The next `count` different chunks expected, nearest first."""
        return [] if self._best is None else self._best.upcoming(count)
