"""The order in which all ranks gather chunks in a training step: data, and pure functions.

Each rank records the uses that a step makes of chunks. From the ranks' records follows one order,
and from the order and the slots that every rank has at least, which uses begin with an all-gather.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from hetero.planning.belady import ahead_slots, rounds

# Records that are longer together are not merged, which takes time that is quadratic in the worst
# case; nor are those that have little in common, whose union would grow from step to step.
_MOST_MERGED = 1 << 13
_MOST_GROWTH = 4
_MOST_ORDERS = 8  # of which it is remembered which one followed
_MOST_USES = 1 << 14  # of one step; steps with more gather one-sided


class ChunkUse(NamedTuple):
    """A chunk is used in a forward with gradients, or in a backward."""

    chunk: int
    in_backward: bool


class CommonFetch(NamedTuple):
    """An all-gather of a step.

    Attributes:
        chunk: what is gathered.
        place: which use needs it, counted from the step's beginning.
        after: the use after which its room is free.
    """

    chunk: int
    place: int
    after: int


class AgreedOrder:
    """The uses of a training step in the order that all ranks know, and its all-gathers.

    A step that goes on after its last use begins again, as one of more micro-batches does.

    Attributes:
        uses: a use of a chunk does not follow another one of the same.
        phases: by use the number of its phase, a forward or a backward, of which several may come.
        places: where each use is, in ascending order.
    """

    def __init__(
        self,
        uses: Sequence[ChunkUse],
        slots_of: Mapping[int, int],
        capacity: int,
        kept: Collection[int],
    ) -> None:
        """The order of `uses`, of which there are some.

        Args:
            uses: of one step.
            slots_of: by chunk.
            capacity: every rank has at least so many slots for gathered copies.
            kept: chunks whose copies last from step to step.
        """
        self.uses = tuple(uses)
        used = {use.chunk: slots_of[use.chunk] for use in uses}
        chunks, ahead = [use.chunk for use in uses], ahead_slots(used, capacity)
        self._rounds = rounds(chunks, slots_of, capacity, kept, ahead)
        self._gathers: list[CommonFetch] = []
        self._planned = 0  # rounds
        self._has_all = False  # nothing is gathered in later rounds
        self.phases: list[int] = []
        self.places: dict[ChunkUse, list[int]] = {}
        for place, use in enumerate(self.uses):
            changes = place > 0 and use.in_backward != self.uses[place - 1].in_backward
            self.phases.append((self.phases[-1] if self.phases else 0) + changes)
            self.places.setdefault(use, []).append(place)

    def last_of_round(self, place: int) -> int:
        """The last use of the round that has the use `place`."""
        return place // len(self.uses) * len(self.uses) + len(self.uses) - 1

    def gather(self, number: int) -> CommonFetch | None:
        """All-gather number `number` of a step; None if nothing is gathered any more."""
        while len(self._gathers) <= number:
            if self._has_all:
                return None
            first = self._planned * len(self.uses)
            fetches = next(self._rounds)
            # (A round that finds everything leaves everything to the next one.)
            self._has_all = self._planned > 0 and not fetches
            self._planned += 1
            self._gathers += [
                CommonFetch(self.uses[each.use].chunk, first + each.use, first + each.after)
                for each in fetches
            ]
        return self._gathers[number]


@dataclass
class Progress:
    """How far one rank is in a step of an order.

    Attributes:
        passed: uses that lie behind it, made or skipped, of all rounds.
        deviations: uses that it has made and the order did not expect.
    """

    order: AgreedOrder
    passed: int = 0
    deviations: int = 0
    _phase: int = -1  # of the last use that was expected

    def note(self, use: ChunkUse) -> bool:
        """Follows a use; returns whether the order expects it.

        A rank may skip uses, but no whole phase: a forward that only this rank makes must not be
        taken for the next one of all.
        """
        places, length = self.order.places.get(use, ()), len(self.order.uses)
        first = self.passed // length * length  # of the round, or of the next one
        index = bisect_left(places, self.passed - first)
        phase = self._phase if self.passed > first or not self.passed else -1
        if index < len(places) and self.order.phases[places[index]] <= phase + 1:
            return self._advance(first + places[index])
        if phase == self.order.phases[-1] and places and self.order.phases[places[0]] == 0:
            return self._advance(first + length + places[0])
        self.deviations += 1
        return False

    def _advance(self, place: int) -> bool:
        self.passed = place + 1
        self._phase = self.order.phases[place % len(self.order.uses)]
        return True

    @property
    def is_as_expected(self) -> bool:
        """Whether all uses were expected, and none of the order's phases is missing."""
        return not self.deviations and self._phase == self.order.phases[-1]


class StepUses:
    """The uses that this rank's step has made, beside the order that all ranks know.

    Attributes:
        progress: how far this rank is in the order; None: nothing is gathered together.
        leads: whether the last use was expected, so that the order, and not this rank alone, says
            what is gathered ahead of its use.
    """

    def __init__(self, slots_of: Mapping[int, int], kept: Collection[int]) -> None:
        """Nothing is agreed on. Arguments as AgreedOrder()."""
        self._slots_of, self._kept = slots_of, kept
        self._slots = 0  # that every rank has at least
        self.progress: Progress | None = None
        self.leads = False
        self._made: list[ChunkUse] = []
        self._last: AgreedOrder | None = None  # the order of the step before this one
        self._next: dict[tuple[ChunkUse, ...], AgreedOrder] = {}  # which step has followed which

    def note(self, use: ChunkUse, others_come: bool) -> bool:
        """Follows a use; returns whether it is another one than the last, and expected.

        `others_come`: else what is gathered together only takes slots.
        """
        if self._made and self._made[-1] == use:
            return False
        if len(self._made) < _MOST_USES:
            self._made.append(use)
        self.leads = self.progress is not None and others_come and self.progress.note(use)
        return self.leads

    def proposed(self) -> tuple[ChunkUse, ...]:
        """The order of uses that this rank proposes for the next step like this one."""
        progress, uses = self.progress, without_repeats(self._made)
        if progress is not None and (progress.is_as_expected or not uses):
            return progress.order.uses
        return uses

    def end_step(self, uses: tuple[ChunkUse, ...], slots: int) -> None:
        """All ranks say that the step has made these uses; each has at least so many slots."""
        made = self._make_order(uses, slots)
        self.progress = None
        if made is not None:
            if self._last is not None:
                self._next[self._last.uses] = made
                while len(self._next) > _MOST_ORDERS:
                    del self._next[next(iter(self._next))]
            self._last = made
            self.progress = Progress(self._next.get(made.uses, made))
        self._slots = slots
        self._made.clear()
        self.leads = False

    def _make_order(self, uses: tuple[ChunkUse, ...], slots: int) -> AgreedOrder | None:
        """The order of these uses; None if nothing was used, or it cannot be followed."""
        if not uses or len(uses) >= _MOST_USES:
            return None
        if slots != self._slots:
            self._next.clear()
            self._last = None
        elif self.progress is not None and uses == self.progress.order.uses:
            return self.progress.order
        return AgreedOrder(uses, self._slots_of, slots, self._kept)

    def begin(self, chunks: Sequence[int], slots: int) -> None:
        """Expects a forward over `chunks`, and back; every rank has at least so many slots."""
        self.forget()
        self._slots = slots
        if chunks and len(chunks) < _MOST_USES // 2:
            forward = [ChunkUse(chunk, False) for chunk in chunks]
            backward = [ChunkUse(chunk, True) for chunk in reversed(chunks)]
            order = AgreedOrder(forward + backward, self._slots_of, slots, self._kept)
            self.progress = Progress(order)

    def forget(self) -> None:
        """Nothing is agreed on any more."""
        self.progress = self._last = None
        self._next.clear()
        self._made.clear()


def fingerprint(uses: Sequence[ChunkUse]) -> int:
    """A number that other sequences do not have."""
    content = np.asarray(_encoded(uses), dtype=np.int64).tobytes()
    return int.from_bytes(blake2b(content, digest_size=7).digest(), "little")


def to_bytes(uses: Sequence[ChunkUse]) -> bytes:
    """A record, for other ranks."""
    return np.asarray(_encoded(uses), dtype="<i4").tobytes()


def from_bytes(content: bytes) -> tuple[ChunkUse, ...]:
    """The record that to_bytes() was given."""
    numbers = np.frombuffer(content, dtype="<i4").tolist()
    return tuple(ChunkUse(number >> 1, bool(number & 1)) for number in numbers)


def _encoded(uses: Sequence[ChunkUse]) -> list[int]:
    return [use.chunk << 1 | use.in_backward for use in uses]


def merge(records: Sequence[tuple[ChunkUse, ...]]) -> tuple[ChunkUse, ...]:
    """A sequence that has each of `records` in it, in its order, if that is not much longer.

    Else the first of them. Where ranks use different chunks (experts), it has those of all.
    """
    different = list(dict.fromkeys(record for record in records if record))
    if not different:
        return ()
    merged = list(different[0])
    if sum(map(len, different)) > _MOST_MERGED:
        return different[0]
    for record in different[1:]:
        matcher = SequenceMatcher(None, merged, record, autojunk=False)
        joined: list[ChunkUse] = []
        for _, begin, end, other_begin, other_end in matcher.get_opcodes():
            joined += merged[begin:end]
            if merged[begin:end] != list(record[other_begin:other_end]):
                joined += record[other_begin:other_end]
        merged = joined
    if len(merged) > _MOST_GROWTH * max(map(len, different)):
        return different[0]
    return without_repeats(merged)


def without_repeats(uses: Sequence[ChunkUse]) -> tuple[ChunkUse, ...]:
    """The sequence without uses of a chunk that follow a use of the same one."""
    kept = [use for place, use in enumerate(uses) if not place or uses[place - 1] != use]
    return tuple(kept)
