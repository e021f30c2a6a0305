"""Which all-gathers all ranks make in a training step, and when this rank takes part in them.

Each rank records the uses that a step makes of chunks. From the ranks' records follows one order,
and from the order and the slots that every rank has at least, which uses begin with an all-gather.
All ranks know the order. As this rank makes the
uses, it starts the all-gathers that belong to them and to the next few, so all ranks start the same
ones in the same order, and none waits for another one but in an all-gather. A rank that does not
use a chunk starts its gather when it uses a later one.

What the order does not expect (another module, a lone evaluation, values that something else looks
at) the rank reads one-sided. At the end of a step all ranks catch up with the one that has started
most; a rank that waits before that asks the others to. So a rank may make other uses than the
others, or more forwards and backwards, and goes on.

Steps with more micro-batches than the order begin it again. For steps that take turns, as a GAN's
two, the one that follows is remembered. A digest of chunks and versions proves at the end of a step
that all ranks have made the same gathers.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch

from hetero.chunks.layout import Chunk, Layout
from hetero.planning.belady import PREFETCH_CHUNKS, ahead_slots, rounds
from hetero.ranks.communicator import Communicator
from hetero.state.gathering.all_gather import Gathering
from offload.cache.slot_cache import SlotCache
from offload.errors import BudgetError, HeteroError
from offload.memory.operation import Operation

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
    return int.from_bytes(blake2b(to_bytes(uses), digest_size=7).digest(), "little")


def to_bytes(uses: Sequence[ChunkUse]) -> bytes:
    """A record, for other ranks."""
    return np.asarray([use.chunk << 1 | use.in_backward for use in uses], dtype="<i4").tobytes()


def from_bytes(content: bytes) -> tuple[ChunkUse, ...]:
    """The record that to_bytes() was given."""
    numbers = np.frombuffer(content, dtype="<i4").tolist()
    return tuple(ChunkUse(number >> 1, bool(number & 1)) for number in numbers)


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


class AgreedGathers:
    """This rank's part in the all-gathers of one chunk group.

    Callers hold `lock`, which is that of the chunk group's ChunkAccess; so does help().

    Attributes:
        uses: of this rank's step, beside the order that all ranks know.
    """

    def __init__(
        self,
        layout: Layout,
        gathering: Gathering,
        is_resident: Callable[[Chunk], bool],
        cache: SlotCache,
        prefetch: bool,
    ) -> None:
        """Nothing is agreed on before begin(): the rank gathers one-sided.

        Args:
            gathering: starts the all-gathers.
            is_resident: whether a chunk is used where its home is.
            cache: the slots of gathered copies.
            prefetch: all-gathers are started ahead of their use.
        """
        self._layout = layout
        self.gathering = gathering
        self._is_resident = is_resident
        self.cache = cache
        self.lock = threading.RLock()
        self._ahead = PREFETCH_CHUNKS if prefetch else 0
        kept = frozenset(c.id for c in layout.chunks if not c.trainable)
        self.uses = StepUses({c.id: c.slots for c in layout.chunks}, kept)
        self._first = 0  # number of the step's first all-gather
        self._started = 0  # in this step
        self._in_forward = False
        self._is_starting = False

    # Uses

    def note_forward(self, begins: bool) -> None:
        """A forward of the whole model with gradients begins, or ends."""
        self._in_forward = begins

    def note(self, chunk: Chunk) -> None:
        """The chunk is about to be used where it has to be gathered.

        Starts the all-gathers that all ranks make up to here, and ahead.
        """
        in_backward = torch._C._current_graph_task_id() != -1
        if not in_backward and not self._in_forward:
            self.uses.leads = False
        elif self.uses.note(ChunkUse(chunk.id, in_backward), not self.gathering.counts.is_stalled):
            progress = self.uses.progress
            assert progress is not None
            self._start_up_to(progress.order, progress.passed - 1)

    def _start_up_to(self, order: AgreedOrder, place: int) -> None:
        """Starts the all-gathers of the uses up to `place`, and those ahead that have room."""
        while (gather := self._next_gather()) is not None:
            must = gather.place <= place
            # (Whether another round follows, or the step ends, nobody knows.)
            farthest = min(place + self._ahead, order.last_of_round(place))
            if not must and (gather.place > farthest or gather.after >= place):
                return
            if not self._start(gather, must):
                return

    def _next_gather(self) -> CommonFetch | None:
        progress = self.uses.progress
        return None if progress is None else progress.order.gather(self._started)

    def _start(self, gather: CommonFetch, must: bool) -> bool:
        """Starts the next all-gather. Returns False if that is not a `must` and there is no room.

        If this rank cannot keep the chunk, or has it, it takes part for the others alone.
        """
        chunk = self._layout.chunks[gather.chunk]
        has_it = self.cache.holds(chunk.id)
        self._is_starting = True
        try:
            if not has_it and self._begin(chunk.id, must):
                pass  # _read() has started it
            elif not (has_it or must):
                return False
            else:
                self.gathering.start(chunk)
        finally:
            self._is_starting = False
        self._started += 1
        return True

    def _begin(self, chunk: int, must: bool) -> bool:
        """Starts bringing the chunk to slots, with all ranks; False if there is no room."""
        try:
            return self.cache.begin(chunk, must, self._read)
        except BudgetError:  # who needs it in a moment, and not only other ranks, meets it again
            return False

    def _read(self, chunk: int, read_alone: Callable[[], Operation]) -> Operation:
        """In the place of the slots' backing, which reads one-sided."""
        whole = self.cache.tensor(chunk, self.gathering.dtype, pinned=False)
        return self.gathering.start(self._layout.chunks[chunk], whole, read_alone)

    # Other ranks

    def help(self) -> bool:
        """Takes part in all-gathers in which another rank waits for this one, which waits, too.

        Returns whether there were any.
        """
        started, wanted = self.gathering.counts.started, self.gathering.server.wanted
        if wanted <= started or self._is_starting:
            return False
        if self.cache.is_making_room or not self.lock.acquire(blocking=False):
            return False
        try:
            self._catch_up(wanted - self._first)
        finally:
            self.lock.release()
        return self.gathering.counts.started > started

    def _catch_up(self, started: int) -> None:
        """Starts all-gathers until so many of the step's are started."""
        while self._started < started and (gather := self._next_gather()) is not None:
            self._start(gather, must=True)

    def step_record(self) -> tuple[int, tuple[ChunkUse, ...], int]:
        """What this rank tells the others now: how many all-gathers it has started since the last
        step's end, the uses that it proposes for the next step like this one, and how many slots
        it has for gathered copies."""
        return self._started, self.uses.proposed(), self.cache.slots

    def level(self, started: int) -> None:
        """Starts what another rank has started, and waits for all; all ranks then have the same.

        Raises PeerError.
        """
        self._catch_up(started)
        self.cache.finish_transfers()
        self.gathering.wait_all()

    def end_step(self, records: Collection[tuple[ChunkUse, ...]], slots: int) -> None:
        """A step is over, and values are going to change.

        Args:
            records: those of all ranks, in their order; those that are the same may be one.
            slots: every rank has at least so many.
        """
        self.uses.end_step(merge(list(records)), slots)
        self._first += self._started
        self._started = 0
        self._in_forward = False

    def begin(self, slots: int, all_in_ram: bool) -> None:
        """Expects chunks in the order of registration, and back: all that ranks know at first.

        All ranks call it; each has at least so many `slots`, and all its shards in memory if
        `all_in_ram`.
        """
        self.forget()
        self.gathering.note_homes(all_in_ram)
        self.uses.begin([c.id for c in self._layout.chunks if not self._is_resident(c)], slots)

    def forget(self) -> None:
        """Slots are about to change: nothing is gathered together until begin(), or a step's end.

        All ranks call it.
        """
        self.gathering.note_homes(all_in_ram=False)
        self.uses.forget()
        self._first += self._started
        self._started = 0


def begin_gathers(gathers: Sequence[AgreedGathers], shard: Communicator) -> None:
    """Expects the order of registration, until a step has been seen. All ranks call it.

    Raises PeerError.
    """
    mine = torch.tensor(
        [(each.cache.slots, each.gathering.has_all_in_ram) for each in gathers], device="cpu"
    )
    least = shard.all_gather(mine, "comparing slots").amin(0).tolist()
    for each, (slots, all_in_ram) in zip(gathers, least, strict=True):
        each.begin(slots, bool(all_in_ram))


def agree_on_gathers(
    gathers: Sequence[AgreedGathers], shard: Communicator, ends_step: bool, what: str
) -> None:
    """Until all ranks have made the same all-gathers, and none is under way. All ranks call it.

    Args:
        gathers: those of each chunk group, in the same order on all ranks.
        shard: the ranks of the shard group.
        ends_step: what comes is another step, in the order that the ranks then agree on.
        what: names the call in errors.

    Raises:
        PeerError: another rank failed, or did not come.
        HeteroError: the ranks have gathered different chunks, so what they computed is wrong.
    """
    mine = [each.step_record() for each in gathers]
    # First a number in the place of uses, which other sequences do not have.
    numbers = [(started, fingerprint(uses), slots) for started, uses, slots in mine]
    # By rank and chunk group.
    told = shard.all_gather(torch.tensor(numbers, device="cpu"), what)
    for each, started in zip(gathers, told[:, :, 0].amax(0).tolist(), strict=True):
        each.level(started)
    digests = torch.tensor([each.gathering.digest() for each in gathers], device="cpu")
    if not shard.are_same(digests, what):
        raise HeteroError(
            "the ranks have gathered different chunks, or different versions of them, since the "
            "last step, so gradients may be wrong; this is a defect of hetero, please report it"
        )
    for each in gathers:
        each.gathering.transport.let_go()
    if not ends_step:
        return
    for number, (each, (_, uses, _)) in enumerate(zip(gathers, mine, strict=True)):
        records = [uses]
        if told[:, number, 1].ne(told[0, number, 1]).any():
            found = shard.all_gather_bytes(to_bytes(uses), what)
            records = [from_bytes(content) for content in found]
        each.end_step(records, int(told[:, number, 2].min()))
