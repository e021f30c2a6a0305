"""Gradients of one rank on their way to the mean over all ranks.

A *round* is what one backward (or several, of different parameters) brings. In it all ranks send
chunks in the same order, so that each message finds its receiver: a chunk is sent when all its
gradients have arrived and all chunks before it have been sent. For parameters without a gradient a
rank sends zeros. At the end of the round the ranks tell each other which parameters got a gradient
anywhere.

A rank ends a round when it must: a parameter whose gradient has been sent gets another one, there
are not enough buckets, or means are needed. Ranks that need nothing take part in the rounds of
those that do, so neither the number of backward calls nor the parameters they use need be the same
on all ranks.

What a rank clears, or assigns anew, may be in a mean with others' gradients already, and cannot be
taken out. So the ranks also compare what each has left behind: all that was kept when the last
round ended, or none of it, and nothing that another's gradient of this round was added to.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain

import torch

from hetero.chunks.layout import Chunk, Layout
from hetero.ranks.collectives import Collective
from hetero.ranks.communicator import Communicator
from hetero.ranks.peers import Channel
from hetero.ranks.process_groups import ProcessGroups
from hetero.state.grads import Grads, LossScale, put_grad
from hetero.state.managed_param import ManagedParam
from hetero.state.reduction.means import Bucket, DeviceMean, RankMean, ReduceBuffers
from offload.device.grad_offload import GradOffload
from offload.errors import BudgetError, HeteroError
from offload.timeline import marked


class SendOrder:
    """The order in which all ranks send chunks.

    At first the reverse of the layout's, which is backward's if modules are registered in the order
    of their use; after the first backward the order in which the first rank's chunks were complete.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        """`chunks` are the trainable ones, in the layout's order."""
        self.is_learned = False
        self._completed: dict[int, None] = {}  # chunk ids, until the order is learned
        self._arrived: set[Hashable] = set()  # parameters, until then
        self._set(chunks[::-1])

    def _set(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = list(chunks)
        self.place = {chunk.id: place for place, chunk in enumerate(chunks)}

    def note_gradient(
        self, chunk: Chunk, members: Sequence[Hashable], arrived: Collection[Hashable]
    ) -> None:
        """A gradient of `chunk` arrived; of its `members` those in `arrived` have one by now."""
        if not self.is_learned:
            self._arrived.update(m for m in members if m in arrived)
            if all(m in self._arrived for m in members):
                self._completed.setdefault(chunk.id)

    def learn(self, everyone: Communicator) -> None:
        """Takes the first rank's order. All ranks must call it. Raises PeerError."""
        by_id = {chunk.id: chunk for chunk in self.chunks}
        order = torch.tensor(list(dict.fromkeys([*self._completed, *by_id])), device="cpu")
        everyone.broadcast(order, 0, "the end of the first backward")
        self._set([by_id[chunk_id] for chunk_id in order.tolist()])
        self.is_learned = True
        self._completed.clear()
        self._arrived.clear()


# Means that take_new() leaves under way: one that is sent while the next chunk's gradients
# come, and one that other ranks may not have come to yet.
_UNDER_WAY = 2


@dataclass
class _Sending:
    """A chunk whose gradient is being averaged."""

    chunk: Chunk
    bucket: Bucket | None  # None: this rank has no gradient of it, and sends zeros
    received_slot: int
    mean: RankMean | DeviceMean


@dataclass
class _Round:
    """What has happened in the round that this rank is in.

    Attributes:
        words: which any_sends arrives by; None until this rank has begun the round.
        sends: whether this rank sends chunks before the round ends.
        any_sends: whether some rank does, so that all walk the order.
        position: in the order of sending: the next chunk. Those before it had their turn.
        arrived: parameters that got a gradient on this rank.
        synced: those of them that got it outside no_sync(), in the order in which it came.
        sent: parameters whose gradient has been sent.
        zeroed: those of `arrived` that were made zero since.
    """

    words: Collective | None = None
    sends: bool = False
    any_sends: torch.Tensor = field(
        default_factory=lambda: torch.zeros(1, dtype=torch.uint8, device="cpu")
    )
    position: int = 0
    arrived: set[ManagedParam] = field(default_factory=set)
    synced: dict[ManagedParam, None] = field(default_factory=dict)
    sent: set[ManagedParam] = field(default_factory=set)
    zeroed: set[ManagedParam] = field(default_factory=set)


class ChunkMeans:
    """Gradients of whole chunks that wait to be averaged, in buckets, and the means under way.

    Attributes:
        wait_s: seconds for which other ranks' gradients were waited for.
        new: whose means have come to this rank's GRAD homes since take_new().
        added_to: parameters whose kept gradient a mean was added to in this round.
    """

    def __init__(
        self,
        layout: Layout,
        world: ProcessGroups,
        buffers: ReduceBuffers,
        grads: Grads,
        loss_scale: LossScale,
        grad_offload: GradOffload | None,
    ) -> None:
        """No gradient waits. Arguments as GradReducer()."""
        self.wait_s = 0.0
        self.new: list[Chunk] = []
        self.added_to: set[ManagedParam] = set()
        self._layout, self._world, self._memory = layout, world, buffers
        self._grads, self._loss_scale, self._grad_offload = grads, loss_scale, grad_offload
        self._buckets: dict[int, Bucket] = {}  # by chunk id
        self._sending: list[_Sending] = []  # the oldest first
        self._accumulated: set[ManagedParam] = set()  # the next mean is added to the kept gradient

    @property
    def is_sending(self) -> bool:
        """Whether some mean is under way."""
        return bool(self._sending)

    @property
    def is_idle(self) -> bool:
        """Whether no gradient waits to be averaged, or is being averaged."""
        return not self._sending and not self._buckets

    def has_mean(self, chunk: Chunk) -> bool:
        """Whether the kept gradient of the chunk is the mean of all that came."""
        return chunk.id not in self._buckets and all(s.chunk is not chunk for s in self._sending)

    def have_arrived(self, members: Iterable[ManagedParam]) -> bool:
        """Whether no gradient of them is on its way from DEVICE."""
        return self._grad_offload is None or not any(map(self._grad_offload.busy, members))

    def unsent(self) -> set[int]:
        """The ids of chunks with gradients of which no mean is begun; while none is under way."""
        assert not self._sending
        return {
            chunk_id
            for chunk_id, bucket in self._buckets.items()
            if any(m.has_grad for m in bucket.filled)
        }

    def resize(self, bucket_slots: int, received_slots: int) -> None:
        """Gives the pools other numbers of slots, while idle. Raises BudgetError."""
        self._memory.resize(bucket_slots, received_slots)

    # Buckets

    def open(self, chunk: Chunk, beyond: bool = False) -> Bucket | None:
        """The chunk's bucket, to be filled, when no mean of it is under way any more.

        Returns None if the pool, whose number of slots is a soft limit, has none left. Slots
        `beyond` the limit are charged; raises BudgetError if there is no room for them.
        """
        self.finish(chunk)
        bucket = self._buckets.get(chunk.id)
        if bucket is None:
            bucket = self._make_bucket(chunk, beyond)
            if bucket is None:
                return None
            self._buckets[chunk.id] = bucket
        return bucket

    def _make_bucket(self, chunk: Chunk, beyond: bool) -> Bucket | None:
        pool = self._memory.buckets
        try:
            slot = pool.take(chunk.slots, beyond=beyond)
        except BudgetError as error:
            raise BudgetError(
                f"gradients that are not averaged over the ranks yet are kept whole, and there is "
                f"no room for that of {chunk.name}: {error}, or leave out no_sync()"
            ) from None
        if slot is None:
            return None
        return Bucket(pool.view(slot, chunk.slots, self._memory.dtype), slot)

    def put(
        self, bucket: Bucket, managed: ManagedParam, grad: torch.Tensor, accumulate: bool
    ) -> None:
        """Copies a whole gradient to its bucket; with `accumulate` it is added to what is there."""
        into = managed.part_of(bucket.flat)
        accumulate = accumulate and managed in bucket.filled
        grad_offload = self._grad_offload
        if grad_offload is not None and not grad_offload.limit_bytes:
            grad_offload = None
        put_grad(managed, grad, into, accumulate, grad_offload)
        if self._memory.device is not None:
            bucket.computed.append(self._memory.device.record())
        bucket.filled.add(managed)

    def forget_kept(self, managed: ManagedParam) -> None:
        """The parameter's next mean replaces the gradient that is kept."""
        self._accumulated.discard(managed)

    def forget(self, managed: ManagedParam) -> None:
        """forget_kept(), and what is in the parameter's bucket counts as zero."""
        self.forget_kept(managed)
        bucket = self._buckets.get(managed.chunk.id)
        if bucket is not None and managed in bucket.filled:
            if self._grad_offload is not None:
                self._grad_offload.wait_ended(managed)
            bucket.filled.discard(managed)

    def write_zeros(self, managed: ManagedParam) -> None:
        """Makes the kept gradient zero if it was forgotten, and no mean has come since."""
        if managed not in self._accumulated:
            self._grads.change(managed, lambda kept: kept.zero_())
            self._accumulated.add(managed)

    def free_cleared(self) -> None:
        """Frees buckets whose gradients were all cleared before they were sent."""
        for chunk_id, bucket in list(self._buckets.items()):
            if not any(m.has_grad for m in bucket.filled):
                if self._grad_offload is not None:
                    for m in bucket.filled:
                        self._grad_offload.wait_ended(m)
                self._free_bucket(self._layout.chunks[chunk_id], bucket)

    def _free_bucket(self, chunk: Chunk, bucket: Bucket) -> None:
        """Gives the bucket's slot back to the pool."""
        self._memory.buckets.give_back(bucket.slot, chunk.slots)
        del self._buckets[chunk.id]

    # Averaging

    @marked("hetero::reduce")
    def send(self, chunk: Chunk) -> list[ManagedParam]:
        """Starts averaging the chunk; parameters without a gradient on this rank count as zero.

        Returns those that have one.
        """
        self.finish(chunk)
        bucket = self._buckets.get(chunk.id)
        if bucket is not None:
            self._wait_for_gradients(chunk, bucket)
        pool = self._memory.received
        slot = pool.take(chunk.slots)
        while slot is None:
            self.finish_oldest()
            slot = pool.take(chunk.slots)
        received = pool.view(slot, chunk.slots, self._memory.dtype)
        sent: list[ManagedParam] = []
        if bucket is not None:
            for m in self._grads.members(chunk):
                if m in bucket.filled and m.has_grad:
                    sent.append(m)
                else:
                    m.part_of(bucket.flat).zero_()
        what = f"the gradient of {chunk.name}"
        mean = self._memory.begin_mean(self._world, chunk, bucket, received, slot, what)
        self._sending.append(_Sending(chunk, bucket, slot, mean))
        return sent

    def take_new(self) -> list[Chunk]:
        """The chunks whose means have come; those begun some chunks ago mostly are there by now.

        (gloo cannot be asked whether a message has come, so this may wait for a slower rank.)
        """
        while len(self._sending) > _UNDER_WAY:
            self.finish_oldest()
        new, self.new = self.new, []
        return new

    def _wait_for_gradients(self, chunk: Chunk, bucket: Bucket) -> None:
        """Returns when no gradient of the chunk is on its way from the device.

        Raises HeteroError if one was lost that was not cleared.
        """
        if self._grad_offload is not None:
            for m in self._grads.members(chunk):
                if m in bucket.filled and m.has_grad:
                    self._grad_offload.wait(m, m.name)
                else:  # also one that was cleared: it must not arrive in what is sent
                    self._grad_offload.wait_ended(m)

    def finish(self, chunk: Chunk) -> None:
        """Returns when the chunk is not being averaged."""
        while any(sending.chunk is chunk for sending in self._sending):
            self.finish_oldest()

    @marked("hetero::wait_reduce")
    def finish_oldest(self) -> None:
        """Waits for the chunk that was sent first, and keeps its mean."""
        oldest = self._sending.pop(0)
        began_s = time.perf_counter()
        oldest.mean.wait()
        self.wait_s += time.perf_counter() - began_s
        members = self._grads.members(oldest.chunk)
        mean = oldest.mean.take()
        accumulated = {m for m in members if m in self._accumulated and m.has_grad}
        for m in accumulated:
            self._grads.set_factor(m, self._loss_scale.grad_factor, accumulate=True)
        self._grads.merge(oldest.chunk, mean, accumulated)
        self.added_to |= accumulated
        self._memory.received.give_back(oldest.received_slot, oldest.chunk.slots)
        if oldest.bucket is not None:
            self._free_bucket(oldest.chunk, oldest.bucket)
        self._accumulated.update(members)
        self.new.append(oldest.chunk)

    def finish_all(self) -> None:
        """Returns when no mean is under way."""
        while self._sending:
            self.finish_oldest()


class GradReducer:
    """Takes gradients of whole chunks and hands this rank's shard of their mean to `grads`.

    Chunks are averaged during backward, in buckets that are used again and again; inside no_sync()
    once, when reduce_all() is called, from buckets that stay. In stage 1 that is always so.
    """

    def __init__(
        self,
        layout: Layout,
        members: Sequence[ManagedParam],
        world: ProcessGroups,
        buffers: ReduceBuffers,
        grads: Grads,
        loss_scale: LossScale,
        grad_offload: GradOffload | None = None,
    ) -> None:
        """Makes a reducer without gradients.

        `members` are the trainable parameters, in the same order on all ranks, of which there are
        two or more. `loss_scale` gives the factor of gradients that arrive on other ranks only.
        """
        assert world.everyone is not None
        self.means = ChunkMeans(layout, world, buffers, grads, loss_scale, grad_offload)
        self.changes = 0  # how often means have changed: the same number on all ranks
        self._layout = layout
        self._members = members
        self._everyone: Communicator = world.everyone
        self._grads = grads
        self._order = SendOrder([chunk for chunk in layout.chunks if chunk.trainable])
        self._no_sync_depth = 0  # no_sync() blocks that are open
        self._loss_scale = loss_scale
        self._round = _Round()
        # What had a gradient when the last round ended, the same on all ranks; and what got another
        # one in its place since, or was made zero.
        self._kept: set[ManagedParam] = set()
        self._replaced: set[ManagedParam] = set()

    @property
    def reduces_in_backward(self) -> bool:
        """Whether chunks are averaged while backward runs: outside no_sync()."""
        return not self._no_sync_depth

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside the block gradients are only added up on each rank. Blocks may overlap."""
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1

    @torch.no_grad()  # with create_graph, hooks run with gradients enabled
    def add(self, managed: ManagedParam, grad: torch.Tensor, accumulate: bool) -> None:
        """Takes a gradient that autograd made, and sets `.grad` to the placeholder.

        It is whole; with `accumulate` it is added to the gradient that the parameter has, or else
        replaces that one.

        Raises BudgetError if there is no room for gradients that wait for their mean; HeteroError
        if gradients were cleared on some of the ranks only; PeerError.
        """
        now = self._round
        if accumulate:
            managed.hold_grad()  # has_grad is true again
        # Whether gradients are sent already, or still wait for others of their chunk or come from
        # the device, depends on buckets and on time: neither sums nor rounds may.
        again = managed in now.sent or managed in now.synced
        first = next(iter(now.synced), None)
        if again or (first is not None and not (first.has_grad and first not in now.zeroed)):
            had_grad = managed.has_grad
            self._end_round(done=False)  # this is another backward
            # Others may be in their first since gradients were cleared: it is a part of the sum.
            accumulate = accumulate or (managed.has_grad and not had_grad)
        if self.reduces_in_backward:
            self._begin_round(True)
        if not accumulate:
            self._replaced.add(managed)
        if self._order.place[managed.chunk.id] < self._round.position:  # it had its turn
            self.means.finish(managed.chunk)  # the gradient is added to what other ranks sent
        elif not accumulate:
            self.means.forget_kept(managed)
        self.means.put(self._open(managed.chunk), managed, grad, accumulate)
        managed.hold_grad()
        self._round.arrived.add(managed)
        self._round.zeroed.discard(managed)
        if self.reduces_in_backward:
            self._round.synced[managed] = None
            self._send_complete(managed.chunk)

    def begin_assigned(self) -> None:
        """Assigned gradients come, which are none of the last backward's: it has ended.

        Other ranks may have sent older ones of the same parameters in that, which do not count.
        """
        if self._round.synced:
            self._end_round(done=False)

    def zero(self, managed: ManagedParam) -> None:
        """The gradient counts no more: it is zero, and what comes is added to that.

        All ranks must call it, and ChunkMeans.write_zeros() when all gradients are means.
        """
        self.means.forget(managed)
        if managed in self._round.arrived:
            self._round.zeroed.add(managed)
        self._replaced.add(managed)

    def reduce_all(self, force: bool) -> None:
        """Makes means of all gradients so far. All ranks must call it.

        `force`: also if this rank has averaged all its gradients; else it takes part only if it has
        some that are not averaged, or no gradients at all.

        Raises HeteroError if gradients were cleared on some of the ranks only, until all clear what
        they have; and PeerError, after which training cannot go on.
        """
        if force or self._round.arrived or not any(m.has_grad for m in self._members):
            while not self._end_round(done=True):
                pass  # another rank is in the middle of its backward

    # Buckets

    def _open(self, chunk: Chunk) -> Bucket:
        """The chunk's bucket, to be filled.

        When all slots are in use, they are reclaimed in this order, each until the chunk fits: the
        oldest bucket that is being sent; the next chunks in the order of sending, complete or not
        (gradients that arrive for them later are sent at the end of the round); by ending the
        round, all. Slots beyond the limit are charged where none of that may be: inside no_sync(),
        and while what came there waits for more to be added to it.
        """
        bucket, order = self.means.open(chunk), self._order.chunks
        while bucket is None and self._reclaim_bucket():
            bucket = self.means.open(chunk)
        if bucket is None and self.reduces_in_backward and not any(map(self._adds_up, order)):
            self._end_round(done=False)
            self._begin_round(True)
            bucket = self.means.open(chunk)
        bucket = bucket or self.means.open(chunk, beyond=True)
        assert bucket is not None
        return bucket

    def _reclaim_bucket(self) -> bool:
        """Waits for one chunk's mean, if one is being sent or may be sent; returns whether."""
        if not self.means.is_sending:
            order, position = self._order.chunks, self._round.position
            if not self.reduces_in_backward or position == len(order):
                return False
            if self._adds_up(order[position]):
                return False
            self._send_next()
        self.means.finish_oldest()
        return True

    def _adds_up(self, chunk: Chunk) -> bool:
        """Whether a gradient of the chunk from no_sync() waits for the next one of its parameter.

        The two are added on this rank, however many buckets there are.
        """
        now = self._round
        held = (m for m in self._grads.members(chunk) if m in now.arrived and m not in now.synced)
        return any(m.has_grad for m in held)

    # Rounds

    def _begin_round(self, sends: bool) -> Collective:
        """Begins the round on this rank, as all must; idempotent."""
        now = self._round
        if now.words is None:
            now.sends = sends
            now.any_sends.fill_(sends)
            now.words = self._everyone.begin_any(now.any_sends, "a backward", Channel.ROUNDS)
        return now.words

    def _send_complete(self, chunk: Chunk) -> None:
        """After a gradient of `chunk`: sends the chunks whose turn it is and which are complete."""
        self._order.note_gradient(chunk, self._grads.members(chunk), self._round.synced)
        order = self._order.chunks
        while self._round.position < len(order) and self._is_complete(order[self._round.position]):
            self._send_next()

    def _send_next(self) -> None:
        chunk = self._order.chunks[self._round.position]
        self._round.position += 1
        self._send(chunk)

    def _send(self, chunk: Chunk) -> None:
        self._round.sent.update(self.means.send(chunk))

    def _is_complete(self, chunk: Chunk) -> bool:
        """Whether all gradients of the chunk are in its bucket."""
        members = self._grads.members(chunk)
        if not all(m in self._round.synced and m.has_grad for m in members):
            return False
        # A gradient that is still on its way from the device is sent after a later gradient
        # arrives, or at the end of the round.
        return self.means.have_arrived(members)

    def _end_round(self, done: bool) -> bool:
        """Sends what is left, and learns which parameters got a gradient on any rank.

        `done`: this rank is not in the middle of a backward. Returns whether all are.
        """
        words = self._begin_round(False)
        if not self._round.sends:
            words.wait()  # for the others, only if this rank does not know it
        any_in_backward = self._round.sends or bool(self._round.any_sends)
        if any_in_backward:
            while self._round.position < len(self._order.chunks):
                self._send_next()
            # Before others are waited for: they may need what this rank then does for replicas.
            self.means.finish_all()
        arrived, zeroed, unsent, is_busy = self._agree(done)
        words.wait()
        if any_in_backward:
            # Gradients after their chunk's turn are added to it.
            self._note_arrived(arrived, [True] * len(unsent))
            for managed, is_zeroed in zip(self._members, zeroed, strict=True):
                if is_zeroed and managed.has_grad:
                    self.means.forget_kept(managed)
                    self.means.write_zeros(managed)
        for chunk in self._order.chunks:
            if unsent[chunk.id]:
                self._send(chunk)
        self.means.finish_all()
        self._note_arrived(arrived, unsent)
        if any_in_backward or any(unsent):
            self.changes += 1
        self.means.free_cleared()
        self.means.added_to.clear()
        self._round = _Round()
        # With what was assigned since: others' gradients are kept beside it, so it cannot replace.
        self._replaced.clear()
        self._kept = {
            m
            for m, has_arrived in zip(self._members, arrived, strict=True)
            if m.has_grad or has_arrived
        }
        if not is_busy and any_in_backward and not self._order.is_learned:
            self._order.learn(self._everyone)
        return not is_busy

    def _note_arrived(self, arrived: Sequence[bool], are_sent: Sequence[bool]) -> None:
        """Gives parameters that got a gradient on other ranks only their `.grad` here.

        `are_sent`: the chunks of which means have come; where none has, the gradient is zero.
        """
        for managed, has_arrived in zip(self._members, arrived, strict=True):
            if has_arrived and not managed.has_grad:
                managed.grad_factor = self._loss_scale.grad_factor
                managed.begin_grad()
                if managed.param.grad is None:
                    managed.hold_grad()
                if not are_sent[managed.chunk.id]:
                    self.means.forget_kept(managed)
                    self.means.write_zeros(managed)

    def _agree(self, done: bool) -> tuple[list[bool], list[bool], list[bool], bool]:
        """What is so on any rank at the end of the round. All ranks call it.

        Returns for each parameter whether it got a gradient, and whether that was made zero after
        it had been sent; for each chunk whether it has some that have not been sent; and whether a
        rank is in the middle of its backward.

        Raises HeteroError if means were made of gradients that not all ranks have cleared, or are
        going to be added to what not all have; and PeerError.
        """
        members, chunks, now = self._members, self._layout.chunks, self._round
        unsent_ids = self.means.unsent()
        has_left = {m for m in members if not m.has_grad or m in now.zeroed}
        was_older = {m for m in self._kept if not m.has_grad or m in self._replaced}
        in_means = (now.sent & has_left) | (self.means.added_to & was_older)
        parts = [
            [(m in now.arrived or m in was_older) and m.has_grad for m in members],
            [m in now.arrived and m not in has_left for m in members],
            [m in in_means for m in members],
            [m in self._kept and m not in was_older for m in members],
            [m in was_older for m in members],
            [chunk.id in unsent_ids for chunk in chunks],
            [not done],
        ]
        # As bytes first: setting an element of a tensor takes about a microsecond.
        mine = torch.frombuffer(bytearray(chain.from_iterable(parts)), dtype=torch.uint8)
        flags = self._everyone.any(mine, "the end of backward").split([len(part) for part in parts])
        arrived, counts, cleared, keeps, replaces, unsent, (is_busy,) = (p.tolist() for p in flags)
        for m, does_count, is_cleared, is_kept, is_replaced in zip(
            members, counts, cleared, keeps, replaces, strict=True
        ):
            if (does_count and is_cleared) or (is_kept and is_replaced):
                self._give_up_round(
                    [m for m, *went in zip(members, counts, cleared, strict=True) if any(went)]
                )
                raise HeteroError(
                    f"the gradient of {m.name} was cleared on one rank after it had gone "
                    f"into the mean with that of another; when gradients are cleared before the "
                    f"step, or assigned, all ranks must have made the same backward calls"
                )
        return arrived, cleared, unsent, is_busy

    def _give_up_round(self, averaged: Collection[ManagedParam]) -> None:
        """Ends a round that all ranks refuse; what was `averaged` in it, all must clear."""
        self._begin_round(False).wait()
        self._kept.update(averaged)
        self._replaced |= self._round.zeroed
        self.means.added_to.clear()
        self._round = _Round()
