"""Which all-gathers all ranks make in a training step, and when this rank takes part in them.

All ranks know one order of uses (hetero/state/gathering/agreed_order.py). As this rank makes the
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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from hetero.chunks.layout import Chunk, Layout
from hetero.planning.belady import PREFETCH_CHUNKS
from hetero.ranks.communicator import Communicator
from hetero.ranks.shard_server import GatherNews
from hetero.state.gathering.agreed_order import (
    AgreedOrder,
    ChunkUse,
    CommonFetch,
    StepUses,
    fingerprint,
    from_bytes,
    merge,
    to_bytes,
)
from hetero.state.gathering.all_gather import Gathering
from offload.cache.slot_cache import SlotCache
from offload.errors import BudgetError, HeteroError


@dataclass(frozen=True)
class StepRecord:
    """What one rank tells the others at the end of a step, or before values change.

    Attributes:
        started: how many all-gathers it has started since the last step's end.
        uses: the order of uses that it proposes for the next step like this one.
        slots: it has so many for gathered copies.
    """

    started: int
    uses: tuple[ChunkUse, ...]
    slots: int

    @property
    def numbers(self) -> tuple[int, int, int]:
        """What is told first; instead of `uses` a number that others do not have."""
        return self.started, fingerprint(self.uses), self.slots


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
        news: GatherNews,
        prefetch: bool,
    ) -> None:
        """Nothing is agreed on before begin(): the rank gathers one-sided.

        Args:
            gathering: starts the all-gathers.
            is_resident: whether a chunk is used where its home is.
            cache: the slots of gathered copies.
            news: what other ranks have told.
            prefetch: all-gathers are started ahead of their use.
        """
        self._layout = layout
        self.gathering = gathering
        self._is_resident = is_resident
        self.cache = cache
        self._news = news
        self.lock = threading.RLock()
        self._ahead = PREFETCH_CHUNKS if prefetch else 0
        kept = frozenset(c.id for c in layout.chunks if not c.trainable)
        self.uses = StepUses({c.id: c.slots for c in layout.chunks}, kept)
        self._first = 0  # the stream's number of the step's first all-gather
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
        elif self.uses.note(
            ChunkUse(chunk.id, in_backward), not self.gathering.stream.counts.is_stalled
        ):
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
                pass  # the slots' backing starts it
            elif not (has_it or must) or not self.gathering.take_part(chunk, must):
                return False
        finally:
            self._is_starting = False
        self._started += 1
        return True

    def _begin(self, chunk: int, must: bool) -> bool:
        """Starts bringing the chunk to slots, with all ranks; False if there is no room."""
        if not self.gathering.expect(chunk, must):  # by the backing of the slots
            return False
        has_begun = False
        try:
            has_begun = self.cache.begin(chunk, must)
        except BudgetError:
            pass  # who needs it in a moment, and not only other ranks, meets it again
        finally:
            if not has_begun:
                self.gathering.forget_expected(chunk)
        return has_begun

    # Other ranks

    def help(self) -> bool:
        """Takes part in all-gathers in which another rank waits for this one, which waits, too.

        Returns whether there were any.
        """
        started = self.gathering.stream.counts.started
        if self._news.wanted <= started or self._is_starting:
            return False
        if self.cache.is_making_room or not self.lock.acquire(blocking=False):
            return False
        try:
            self._catch_up(self._news.wanted - self._first)
        finally:
            self.lock.release()
        return self.gathering.stream.counts.started > started

    def _catch_up(self, started: int) -> None:
        """Starts all-gathers until so many of the step's are started."""
        while self._started < started and (gather := self._next_gather()) is not None:
            self._start(gather, must=True)

    def step_record(self) -> StepRecord:
        """What this rank tells the others now."""
        return StepRecord(self._started, self.uses.proposed(), self.cache.slots)

    def level(self, started: int) -> None:
        """Starts what another rank has started, and waits for all; all ranks then have the same.

        Raises PeerError.
        """
        self._catch_up(started)
        self.cache.finish_transfers()
        self.gathering.stream.wait_all()

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
        self.gathering.stream.note_homes(all_in_ram)
        self.uses.begin([c.id for c in self._layout.chunks if not self._is_resident(c)], slots)

    def forget(self) -> None:
        """Slots are about to change: nothing is gathered together until begin(), or a step's end.

        All ranks call it.
        """
        self.gathering.stream.note_homes(all_in_ram=False)
        self.uses.forget()
        self._first += self._started
        self._started = 0


def begin_gathers(gathers: Sequence[AgreedGathers], shard: Communicator) -> None:
    """Expects the order of registration, until a step has been seen. All ranks call it.

    Raises PeerError.
    """
    mine = torch.tensor([(each.cache.slots, each.gathering.has_all_in_ram) for each in gathers])
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
    numbers = torch.tensor([record.numbers for record in mine])
    told = shard.all_gather(numbers, what)  # ranks, chunk groups, numbers
    for each, started in zip(gathers, told[:, :, 0].amax(0).tolist(), strict=True):
        each.level(started)
    digests = torch.tensor([each.gathering.stream.digest() for each in gathers])
    if not shard.are_same(digests, what):
        raise HeteroError(
            "the ranks have gathered different chunks, or different versions of them, since the "
            "last step, so gradients may be wrong; this is a defect of hetero, please report it"
        )
    for each in gathers:
        each.gathering.stream.let_go()
    if not ends_step:
        return
    for number, (each, record) in enumerate(zip(gathers, mine, strict=True)):
        records = [record.uses]
        if told[:, number, 1].ne(told[0, number, 1]).any():
            found = shard.all_gather_bytes(to_bytes(record.uses), what)
            records = [from_bytes(content) for content in found]
        each.end_step(records, int(told[:, number, 2].min()))
