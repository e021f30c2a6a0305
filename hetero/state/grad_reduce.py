"""Gradients of one rank on their way to the mean over all ranks.

A *round* is what one backward (or several, of different parameters) brings. In it all ranks send
the chunks in the same order, so that each send finds its receiver; a chunk goes as soon as all its
gradients are there and all chunks before it have gone. What a rank has no gradient of it sends as
zeros. At the end of the round the ranks tell each other which parameters got a gradient anywhere.

A rank ends a round when it must: a parameter whose gradient has gone gets another one, buckets run
out for good, or gradients are needed. Ranks that are done take part in the rounds of those that are
not, so neither backwards nor parameters need be the same on all ranks.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from hetero.chunks.layout import Chunk, Layout
from hetero.ranks.mean import mean_into
from hetero.ranks.messages import Exchange, Lane, Peers
from hetero.ranks.process_groups import World
from hetero.state.grads import Grads
from hetero.state.homes import Homes
from hetero.state.managed_param import ManagedParam
from offload.device.grad_offload import GradOffload
from offload.errors import BudgetError, HeteroError
from offload.memory.arena import HostArena
from offload.memory.slot_pool import SlotPool


def _nothing(*_: object) -> None:
    pass


class BucketState(enum.Enum):
    """Who may touch a bucket's memory."""

    FILLING = "gradients arrive from autograd"
    SENDING = "its parts are on their way to the ranks that average them"
    MEAN = "this rank's shard in it is the mean over the ranks; the rest means nothing (stage 1)"


@dataclass
class _Bucket:
    flat: torch.Tensor
    slot: int | None  # in the pool; None: the chunk's whole GRAD home
    state: BucketState = BucketState.FILLING
    filled: set[ManagedParam] = field(default_factory=set)


@dataclass(frozen=True)
class _Told:
    """What the ranks say at the end of a round, of all of them together."""

    arrived: set[int]  # indices of the members that got a gradient
    waiting: set[int]  # ids of chunks with gradients that have not gone
    late: set[int]  # those of them whose turn in the round is over
    all_done: bool  # nobody is in the middle of a backward


@dataclass
class _Sending:
    chunk: Chunk
    bucket: _Bucket | None  # None: this rank has nothing, and sends zeros
    parts: list[torch.Tensor]
    received: torch.Tensor
    receive_slot: int
    exchange: Exchange


class Buckets:
    """Takes gradients of whole chunks and hands on this rank's shard of their mean.

    With sharded gradients (stages 2 and 3) chunks are averaged during backward, in buckets that are
    used again and again; in stage 1, and inside no_sync(), once, when settle() is called, from
    buckets that stay.
    """

    def __init__(
        self,
        layout: Layout,
        members: Sequence[ManagedParam],
        world: World,
        dtype: torch.dtype,
        homes: Homes | None,
        pool: SlotPool | None,
        receiving: SlotPool,
        between_replicas: HostArena | None,
        grads: Grads,
        grad_offload: GradOffload | None = None,
    ) -> None:
        """`members` are the trainable parameters, in the model's order; `homes` has whole GRAD
        homes (stage 1), or `pool` slots for buckets, whose means go to `grads`. `receiving` is for
        other ranks' gradients, `between_replicas` for a shard of those of other replicas.
        `drain` brings gradients from a DEVICE that is not RAM.
        """
        assert world.everyone is not None
        self._layout = layout
        self._world = world
        self._everyone: Peers = world.everyone
        self._dtype = dtype
        self._homes = homes
        self._pool = pool
        self._receiving = receiving
        self._between_replicas = between_replicas
        self._grads = grads
        self._grad_offload = grad_offload
        self.members = list(members)
        # Called before a gradient is added to what is kept (True) or takes its place (False), of
        # which this rank has no part itself; and when means have changed.
        self.renew: Callable[[ManagedParam, bool], object] = _nothing
        self.changed: Callable[[], object] = _nothing
        self._of_chunk: dict[int, list[ManagedParam]] = {}
        for m in members:
            self._of_chunk.setdefault(m.chunk.id, []).append(m)
        chunks = [c for c in layout.chunks if c.trainable]
        self._order = chunks[::-1]  # backward's, if modules are registered in the order of use
        self._buckets: dict[int, _Bucket] = {}
        self._sending: list[_Sending] = []
        self.wait_s = 0.0  # for other ranks' gradients
        self._kept: set[ManagedParam] = set()  # whose kept gradient is to be added to
        self._held = 0  # no_sync() blocks that are open, in any order
        self._completed: list[int] | None = []  # chunk ids, until the order is learned
        self._seen: set[ManagedParam] = set()  # arrived early, until then
        # Of this round:
        self._begun: tuple[Exchange, list[torch.Tensor]] | None = None  # who sends early
        self._arrived: set[ManagedParam] = set()  # anywhere, once the round is over
        self._sent: set[ManagedParam] = set()  # whose gradient has gone
        self._since_held: set[ManagedParam] = set()  # arrived outside no_sync()
        self._next = 0  # in _order: the next chunk to be sent
        self._passed: set[int] = set()  # ids of the chunks before it

    @property
    def is_idle(self) -> bool:
        """Whether no gradient waits to be averaged, or is being."""
        means = all(bucket.state is BucketState.MEAN for bucket in self._buckets.values())
        return means and not self._sending and (self._pool is None or not self._buckets)

    def let_go(self) -> None:
        """Views no home any more, while idle; buckets that stay find theirs again."""
        if self._pool is None:
            for bucket in self._buckets.values():
                bucket.flat = torch.empty(0)

    def refit(self, bucket_slots: int, receive_slots: int) -> None:
        """Other numbers of slots for every day, while idle. Raises BudgetError."""
        if self._pool is not None:
            self._pool.refit(max(self._pool.arena.slots, bucket_slots), bucket_slots)
        self._receiving.refit(receive_slots, receive_slots)

    def reserve(self, slots: int) -> None:
        """Room for `slots` more, from now on. Raises BudgetError, with nothing changed."""
        if self._pool is not None:
            self._pool.reserve(slots)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients are only added up on each rank."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    @property
    def early(self) -> bool:
        """Whether chunks are averaged during backward now."""
        return self._pool is not None and not self._held

    @torch.no_grad()  # with create_graph, hooks run with gradients enabled
    def add(self, managed: ManagedParam, grad: torch.Tensor, accumulate: bool) -> None:
        """Takes a gradient that autograd made. Sets `.grad` to the placeholder."""
        if accumulate:
            managed.param.grad = managed.absent_grad  # has_grad is true again
        # Also a gradient that waits for others of its chunk is not added to: whether it waits is a
        # matter of buckets, and sums must not depend on how many there are.
        again = managed in self._sent or (accumulate and managed in self._since_held)
        if again or (self._sent and not next(iter(self._sent)).has_grad):
            self._end_round(done=False)  # another backward has begun
        if self.early:
            self._begin_round(True)
        if managed.chunk.id in self._passed:
            self._finish(managed.chunk)  # what came from other ranks is to be added to
        elif not managed.has_grad:
            self._kept.discard(managed)
        bucket = self._open(managed.chunk)
        into = managed.part_of(bucket.flat)
        accumulate = accumulate and managed in bucket.filled
        if self._grad_offload is not None and self._grad_offload.limit_bytes:
            self._grad_offload.take(managed, managed.name, grad, into, accumulate)
        elif accumulate:
            into.add_(grad)
        else:
            into.copy_(grad)
        bucket.filled.add(managed)
        managed.param.grad = managed.absent_grad
        self._arrived.add(managed)
        if self.early:
            self._since_held.add(managed)
            self._send_complete(managed.chunk)

    def settle(self, force: bool) -> None:
        """All gradients so far become means, at home. All ranks must call it.

        Without `force` only if this rank has some that are not, or none at all. Raises PeerError if
        a rank does not, and then, as after any of its failures, the ranks' gradients differ:
        training cannot go on.
        """
        if force or self._arrived or not any(m.has_grad for m in self.members):
            while not self._end_round(done=True):
                pass  # another rank is in the middle of its backward

    # Memory

    def _open(self, chunk: Chunk) -> _Bucket:
        """The chunk's bucket, in state FILLING."""
        self._finish(chunk)
        bucket = self._buckets.get(chunk.id)
        if bucket is None:
            bucket = self._buckets[chunk.id] = self._make(chunk)
        elif self._pool is None:
            assert self._homes is not None
            bucket.flat = self._homes.flat(chunk)  # which may have moved
        if bucket.state is BucketState.MEAN:
            self._fill_again(chunk, bucket)
        return bucket

    def _make(self, chunk: Chunk) -> _Bucket:
        if self._pool is None:
            assert self._homes is not None
            return _Bucket(self._homes.flat(chunk), None)
        slot = self._pool.take(chunk.slots)
        while slot is None and self._sending:
            self._finish_oldest()
            slot = self._pool.take(chunk.slots)
        while slot is None and self.early and self._next < len(self._order):
            # Parameters that are not used in this round keep buckets waiting: their chunks go now,
            # and what arrives later goes in the end.
            self._send_next()
            self._finish_oldest()
            slot = self._pool.take(chunk.slots)
        if slot is None and self.early:
            self._end_round(done=False)  # also what came later: no bucket is left in use
            self._begin_round(True)
            slot = self._pool.take(chunk.slots)
        if slot is None:
            try:
                slot = self._pool.take(chunk.slots, beyond=True)
            except BudgetError as error:
                raise BudgetError(
                    f"gradients that are not averaged over the ranks yet are kept whole, and there "
                    f"is no room for that of {chunk.name}: {error}, or leave out no_sync()"
                ) from None
        assert slot is not None
        return _Bucket(self._pool.arena.view(slot, chunk.slots, self._dtype), slot)

    def _fill_again(self, chunk: Chunk, bucket: _Bucket) -> None:
        """Stage 1: more gradients come on top of a mean, which is this rank's part of a sum."""
        for m in self._of_chunk[chunk.id]:
            if m.has_grad:
                self.renew(m, True)
        shard = self._layout.shard.range(bucket.flat.numel())
        bucket.flat[: shard.start].zero_()
        bucket.flat[shard.stop :].zero_()
        bucket.flat[shard].mul_(self._world.size)
        if self._world.replicas is not None and self._world.replicas.rank > 0:
            bucket.flat[shard].zero_()  # one of the replicas has it for all
        bucket.filled = {m for m in self._of_chunk[chunk.id] if m.has_grad}
        bucket.state = BucketState.FILLING

    # Rounds

    def _begin_round(self, early: bool) -> None:
        """Tells the others whether chunks of this rank go before the round ends; idempotent."""
        if self._begun is None:
            mine = torch.tensor([early], dtype=torch.uint8)
            found = [torch.zeros_like(mine) for _ in range(self._everyone.size)]
            found[self._everyone.rank] = mine
            sends = [mine] * self._everyone.size
            exchange = self._everyone.exchange(sends, found, "a backward", Lane.ROUNDS)
            self._begun = exchange, found

    def _send_complete(self, chunk: Chunk) -> None:
        """Sends the chunks whose turn it is and which have all their gradients."""
        if self._completed is not None:
            self._seen.update(m for m in self._of_chunk[chunk.id] if m in self._since_held)
            if all(m in self._seen for m in self._of_chunk[chunk.id]):
                self._completed.append(chunk.id)
        while self._next < len(self._order) and self._is_complete(self._order[self._next]):
            self._send_next()

    def _send_next(self) -> None:
        chunk = self._order[self._next]
        self._next += 1
        self._passed.add(chunk.id)
        self._send(chunk)

    def _is_complete(self, chunk: Chunk) -> bool:
        members = self._of_chunk[chunk.id]
        if not all(m in self._since_held and m.has_grad for m in members):
            return False
        # One that is still on its way from the device goes with a later one, or in the end.
        return self._grad_offload is None or not any(map(self._grad_offload.busy, members))

    def _end_round(self, done: bool) -> bool:
        """Sends what is left, and learns which parameters got a gradient anywhere.

        `done`: this rank is not in the middle of a backward. Returns whether all are.
        """
        self._begin_round(False)
        assert self._begun is not None
        begun, early = self._begun
        if not early[self._everyone.rank]:
            begun.wait()
        any_early = bool(torch.cat(early).any())
        if any_early:
            while self._next < len(self._order):
                self._send_next()
            # Before others are waited for: they may need what this rank does then, for replicas.
            while self._sending:
                self._finish_oldest()
        told = self._tell(done)
        begun.wait()
        if any_early:
            self._note_arrived(told.arrived)  # what is late is added to it
        for chunk in self._order:
            if chunk.id in (told.late if any_early else told.waiting):
                self._send(chunk)
        while self._sending:
            self._finish_oldest()
        self._note_arrived(told.arrived)
        if any_early or told.waiting:
            self.changed()
        self._give_back_cleared()
        self._begun = None
        self._arrived.clear()
        self._sent.clear()
        self._since_held.clear()
        self._passed.clear()
        self._next = 0
        if told.all_done and any_early and self._completed is not None:
            self._learn_order()
        return told.all_done

    def _give_back_cleared(self) -> None:
        """Buckets whose gradients were all cleared before they went."""
        for chunk_id, bucket in list(self._buckets.items()):
            if bucket.slot is not None and not any(m.has_grad for m in bucket.filled):
                assert self._pool is not None
                self._settle_drained(bucket)
                self._pool.give_back(bucket.slot, self._layout.chunks[chunk_id].slots)
                del self._buckets[chunk_id]

    def _note_arrived(self, arrived: set[int]) -> None:
        """Parameters that got a gradient on another rank only have one here, too."""
        for index in sorted(arrived):
            managed = self.members[index]
            if not managed.has_grad:
                self.renew(managed, False)
                managed.param.grad = managed.absent_grad

    def _learn_order(self) -> None:
        """From now on chunks go in the order in which the first rank's became complete."""
        assert self._completed is not None
        seen = dict.fromkeys([*self._completed, *(c.id for c in self._order)])
        order = torch.tensor(list(seen))
        self._everyone.broadcast(order, 0, "the end of the first backward")
        self._order = [self._layout.chunks[chunk_id] for chunk_id in order.tolist()]
        self._completed = None
        self._seen.clear()

    def _tell(self, done: bool) -> _Told:
        """Raises HeteroError if means were made of gradients that not all ranks have cleared."""
        members, chunks = len(self.members), len(self._layout.chunks)
        flags = torch.zeros(2 * members + 2 * chunks + 1, dtype=torch.uint8)
        arrived, cleared, waiting, late, busy = flags.split([members, members, chunks, chunks, 1])
        for index, managed in enumerate(self.members):
            arrived[index] = managed in self._arrived and managed.has_grad
            cleared[index] = managed in self._sent and not managed.has_grad
        for chunk_id, bucket in self._buckets.items():
            if bucket.state is BucketState.FILLING and any(m.has_grad for m in bucket.filled):
                waiting[chunk_id] = True
                late[chunk_id] = chunk_id in self._passed
        busy[0] = not done
        found = self._everyone.all_gather(flags, "the end of backward")
        flags = torch.stack(found).amax(dim=0)
        arrived, cleared, waiting, late, busy = flags.split([members, members, chunks, chunks, 1])
        for index in (arrived & cleared).nonzero().flatten().tolist():
            raise HeteroError(
                f"the gradient of {self.members[index].name} was cleared on one rank after it had "
                f"gone into the mean with that of another; when gradients are cleared before the "
                f"step, all ranks must have made the same backward calls"
            )

        def indices(some: torch.Tensor) -> set[int]:
            return set(some.nonzero().flatten().tolist())

        return _Told(indices(arrived), indices(waiting), indices(late), not bool(busy))

    # Averaging

    def _send(self, chunk: Chunk) -> None:
        """Starts averaging the chunk; what this rank has no gradient of counts as zero."""
        self._finish(chunk)
        bucket = self._open(chunk) if self._pool is None else self._buckets.get(chunk.id)
        if bucket is not None:
            self._wait_drained(chunk, bucket)
        slot = self._receiving.take(chunk.slots)
        while slot is None:
            self._finish_oldest()
            slot = self._receiving.take(chunk.slots)
        received = self._receiving.arena.view(slot, chunk.slots, self._dtype)
        if bucket is not None:
            bucket.state = BucketState.SENDING
            for m in self._of_chunk[chunk.id]:
                if m in bucket.filled and m.has_grad:
                    self._sent.add(m)
                else:
                    m.part_of(bucket.flat).zero_()
        parts = self._parts(self._world.shard, None if bucket is None else bucket.flat, received)
        exchange = self._scatter(self._world.shard, parts, received, chunk.name)
        self._sending.append(_Sending(chunk, bucket, parts, received, slot, exchange))

    def _wait_drained(self, chunk: Chunk, bucket: _Bucket) -> None:
        """Until nothing of the chunk is on its way from the device. Raises HeteroError."""
        if self._grad_offload is not None:
            for m in self._of_chunk[chunk.id]:
                if m in bucket.filled and m.has_grad:
                    self._grad_offload.wait(m, m.name)
                else:  # also one that was cleared: it must not arrive in what is sent
                    self._grad_offload.wait_ended(m)

    def _settle_drained(self, bucket: _Bucket) -> None:
        """Until nothing is on its way to the bucket, whether it arrives or not."""
        if self._grad_offload is not None:
            for m in bucket.filled:
                self._grad_offload.wait_ended(m)

    def _parts(
        self, peers: Peers | None, flat: torch.Tensor | None, received: torch.Tensor
    ) -> list[torch.Tensor]:
        """What each of `peers` gets of this rank's gradient; without one, the same zeros.

        This rank's own part is also where the mean is going to be.
        """
        if flat is not None:
            return [flat] if peers is None else list(flat.chunk(peers.size))
        own = received if peers is None else received.chunk(peers.size)[peers.rank]
        own.zero_()
        return [own] * (1 if peers is None else peers.size)

    def _scatter(
        self,
        peers: Peers | None,
        parts: Sequence[torch.Tensor],
        received: torch.Tensor,
        name: str,
    ) -> Exchange:
        """Sends every peer its part; theirs for this rank come to `received`."""
        if peers is None:
            return Exchange([])
        return peers.exchange(
            parts, received.chunk(peers.size), f"the gradient of {name}", Lane.GRADIENTS
        )

    def _average(
        self, peers: Peers | None, parts: Sequence[torch.Tensor], received: torch.Tensor
    ) -> torch.Tensor:
        """The mean of this rank's own part over `peers`, in the place of that part."""
        if peers is None:
            return parts[0]
        own, theirs = parts[peers.rank], received.chunk(peers.size)
        mean_into(own, [own if p == peers.rank else theirs[p] for p in range(peers.size)])
        return own

    def _finish(self, chunk: Chunk) -> None:
        """Until no gradient of the chunk is on its way."""
        while any(sending.chunk is chunk for sending in self._sending):
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Waits for the chunk that was sent first, averages it, and takes the mean home."""
        done = self._sending.pop(0)
        began_s = time.perf_counter()
        done.exchange.wait()
        self.wait_s += time.perf_counter() - began_s
        members = self._of_chunk[done.chunk.id]
        mean = self._average(self._world.shard, done.parts, done.received)
        replicas = self._world.replicas
        if replicas is not None:
            self._over_replicas(replicas, mean, done.chunk)
        if self._pool is None:
            assert done.bucket is not None
            done.bucket.state = BucketState.MEAN
            done.bucket.filled.clear()
            self._grads.changed(members)
        else:
            kept = {m for m in members if m in self._kept and m.has_grad}
            for m in kept:
                self.renew(m, True)
            self._grads.merge(done.chunk, mean, kept)
        self._receiving.give_back(done.receive_slot, done.chunk.slots)
        if done.bucket is not None and done.bucket.slot is not None:
            assert self._pool is not None
            self._pool.give_back(done.bucket.slot, done.chunk.slots)
            del self._buckets[done.chunk.id]
        self._kept.update(members)

    def _over_replicas(self, peers: Peers, flat: torch.Tensor, chunk: Chunk) -> None:
        """Makes `flat` its mean over the replicas: each averages a part and gives it to all."""
        assert self._between_replicas is not None
        received = self._between_replicas.view(0, chunk.slots, self._dtype)
        parts = self._parts(peers, flat, received)
        self._scatter(peers, parts, received, chunk.name).wait()
        own = self._average(peers, parts, received)
        what = f"the gradient of {chunk.name}"
        peers.exchange([own] * peers.size, parts, what, Lane.GRADIENTS).wait()
