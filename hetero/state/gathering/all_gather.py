"""Whole chunks from the shards of all ranks: gathered by all of them, or read by one alone.

All ranks of a shard group make all-gathers one after the other, in a thread. A rank that waits for
one tells the others, after a tenth of a second, how many it has started, and each of them that
waits for something else starts as many (AgreedGathers.help()). If they do not come within STALL_S
they are in code of the user's, and the rank reads one-sided until they come. A gather whose chunk a
rank does not need is made without memory: pieces that come are dropped, so slots are evicted as if
there were no other ranks.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b

import torch

from hetero.chunks.layout import Chunk, Layout
from hetero.ranks.collectives import Reply
from hetero.ranks.peers import Channel, PeerClosedError, RankOperation
from hetero.ranks.shard_server import RequestKind, ShardServer, Versions
from hetero.ranks.waiting import LOOK_S, SOON_S, name_error
from hetero.state.chunk_updates import OwnShards
from hetero.state.gathering.transport import GatherTransport
from offload.errors import PeerError
from offload.interrupts import deliver_signals
from offload.memory.arena import HostArena
from offload.memory.operation import Operation, Worker, cancelled

# A rank that others have not followed for so long reads the shards it needs one-sided: they are
# in code of the user's, and nobody knows whether they will ever come.
STALL_S = 5.0
_END_S = 2.0  # for the thread to find out that it has no values, and to tell that
_OFTEN_TOLD = 16  # gathers: one who had to tell the others so few ago has to again, probably


class CommonGather:
    """A chunk that all ranks gather: what Gathering.start() returns."""

    def __init__(
        self,
        gathering: Gathering,
        number: int,
        chunk: Chunk,
        whole: torch.Tensor | None,
        read_alone: Callable[[], Operation] | None,
        keeps_shards: bool,
    ) -> None:
        """`whole` gets the chunk, flat; None: this rank takes part for the others alone.

        `read_alone` starts bringing it there one-sided. `keeps_shards`: ranks may wait for each
        other while they keep their shards open.
        """
        self._gathering = gathering
        self.number = number
        self.chunk = chunk
        self.keeps_shards = keeps_shards
        self.error: BaseException | None = None
        self.closed: PeerClosedError | None = None  # it is not made, because a rank has left
        self.ended = threading.Event()
        self.target = gathering.transport.target(chunk, whole)
        self._is_kept = whole is not None
        self._read_alone = read_alone
        self._waiting = threading.Lock()

    def wait(self) -> None:
        """Until the chunk is whole for what is computed next.

        If the other ranks do not come for long, or have closed their engines, their shards are
        read one-sided.

        Raises PeerError, what opening this rank's shard raises, and an OSError after cancel().
        """
        with self._waiting:
            if not self._is_kept:
                return self._raise_error()
            began_s = time.perf_counter()
            try:
                while not self._gathering.wait(self):
                    read_alone = self._read_alone  # first: a gather that ends then stores nothing
                    if self.target.let_go():
                        if read_alone is not None:
                            read_alone().wait()
                        break
                    if self.closed is not None:
                        raise copy.copy(self.closed)
                if self.error is None:
                    self.target.follow()
            except Exception as error:
                # A second wait() must fail, too: the memory has no whole chunk.
                self.error = self.error or error.with_traceback(None)
                raise
            finally:
                self._gathering.wait_s += time.perf_counter() - began_s
                self._let_go(self.error)
        self._raise_error()

    def _raise_error(self) -> None:
        if self.error is not None:
            # A copy: what is raised has the caller's frames, and with them tensors that pin slots.
            raise copy.copy(self.error)

    def end(self, error: BaseException | None, closed: PeerClosedError | None) -> None:
        """For Gathering: it is made, or has failed, or a rank has `closed` its engine before."""
        if error is not None:
            self.error = error
        self.closed = closed
        if closed is None:
            self._read_alone = None  # it refers to no home any more

    def cancel(self) -> None:
        """The chunk is not needed. This rank takes part nevertheless; nothing is stored."""
        self._let_go(cancelled())

    def _let_go(self, error: BaseException | None) -> None:
        """Nothing is written to the memory any more."""
        self.target.let_go()
        if self._is_kept:
            self.error = error
        self._is_kept = False


@dataclass
class GatherCounts:
    """How many gathers are started, and how many are made: they end in their order.

    Attributes:
        started: by this rank.
        told: the other ranks were told that so many were started.
        prepared: of those, this rank has values, or has told why not.
        made: of those, by all ranks.
        closed: no more are made, because a rank has left; None: they are.
        stalled_at: how many were made when this rank gave up waiting for others.
    """

    started: int = 0
    told: int = -_OFTEN_TOLD
    prepared: int = 0
    made: int = 0
    closed: PeerClosedError | None = None
    stalled_at: int = -1

    @property
    def is_stalled(self) -> bool:
        """Whether this rank waits for others no more, because none has come since it gave up, or
        because one has closed its engine."""
        return self.closed is not None or self.stalled_at == self.made < self.started


@dataclass(eq=False)
class OneSidedGather:
    """A chunk whose shards one rank has requested; wait() copies this rank's own.

    The other ranks' shards arrive in `whole`, the whole chunk, flat, without this rank's doing.
    """

    gathering: Gathering
    chunk: Chunk
    whole: torch.Tensor | None
    replies: Sequence[Reply]
    # Copies to a device are waited for in another thread.
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def wait(self) -> None:
        """Waits until the chunk is whole.

        Raises PeerError if another rank's shard did not come; BudgetError or NativeIoError if this
        rank's cannot be read.
        """
        with self._lock:
            if self.whole is not None:
                self._wait()

    def _wait(self) -> None:
        assert self.whole is not None
        started = time.perf_counter()
        try:
            self.gathering.copy_own(self.chunk, self.whole)
        finally:
            # Also after an error: nothing may arrive once the memory has another use.
            for reply in self.replies:
                reply.wait()
        self.whole = None
        self.gathering.wait_s += time.perf_counter() - started

    def cancel(self) -> None:
        """No-op: the other ranks' shards come anyway, so wait() must be called."""


class Gathering:
    """Makes the gathers of one chunk group: the Backing of gathered copies in RAM.

    The all-gathers of all ranks are made in the order in which they are started, the same on all.

    Attributes:
        server: asks the other ranks for their shards, and answers them.
        transport: brings the shards of an all-gather together.
        dtype: of parameters.
        counts: of all-gathers.
        wait_s: seconds of waiting, which prefetch did not hide.
    """

    def __init__(
        self,
        layout: Layout,
        server: ShardServer,
        shards: OwnShards,
        versions: Versions,
        transport: GatherTransport,
        arena: HostArena,
        dtype: torch.dtype,
    ) -> None:
        """Nothing is gathered yet.

        Args:
            layout: the chunk group's.
            server: of the ranks of the shard group.
            shards: this rank's.
            versions: of the chunks' values.
            transport: between the same ranks.
            arena: has the slots of gathered copies, in RAM: none in stages 1 and 2.
            dtype: of parameters.
        """
        self._layout = layout
        self.server = server
        self._shards = shards
        self._versions = versions
        self.transport = transport
        self._arena = arena
        self.dtype = dtype
        self._worker = Worker("gathers")
        self.counts = GatherCounts()
        self.wait_s = 0.0
        self._digest = blake2b(digest_size=7)
        self._all_in_ram = False

    @property
    def has_all_in_ram(self) -> bool:
        """Whether all shards of this rank are at home in memory."""
        return all(chunk in self._shards.homes for chunk in self._layout.chunks)

    # All ranks together

    def note_homes(self, all_in_ram: bool) -> None:
        """Whether every rank has all of its shards in memory, for gathers that are started later.

        All ranks call it. Until the first call they are taken not to have.
        """
        self._all_in_ram = all_in_ram

    def start(
        self,
        chunk: Chunk,
        whole: torch.Tensor | None = None,
        read_alone: Callable[[], Operation] | None = None,
    ) -> CommonGather:
        """Starts gathering `chunk` to `whole`, flat, where this rank's shard may be already.

        Without `whole` this rank takes part for the others alone. If these do not come,
        `read_alone`, by default that of this object, starts reading the chunk.
        """
        if read_alone is None and whole is not None:
            read_alone = partial(self.read_alone, chunk, whole)
        gather = CommonGather(self, self.counts.started, chunk, whole, read_alone, self._all_in_ram)
        self.counts.started += 1
        version = self._versions[chunk]
        self._digest.update(f"{chunk.id} {version};".encode())
        self._worker.do(lambda: self._make(gather))
        return gather

    def digest(self) -> int:
        """A number that is the same on all ranks that have started the same gathers."""
        return int.from_bytes(self._digest.digest(), "little")

    def _make(self, gather: CommonGather) -> None:
        """In the worker's thread."""
        error: BaseException | None = None
        if self.counts.closed is None:
            try:
                error = self._gather(gather)
            except PeerClosedError as closed:
                self.counts.closed = closed.with_traceback(None)
        gather.end(error, self.counts.closed)
        self.counts.made += self.counts.closed is None
        gather.ended.set()

    def _gather(self, gather: CommonGather) -> BaseException | None:
        """Returns what went wrong. Raises PeerClosedError."""
        error: BaseException | None = None
        try:
            try:
                self._shards.wait_computed(gather.chunk)
            except Exception as failure:  # of the update that makes the values
                error = self._tell_failure(gather, failure)
            finally:
                self.counts.prepared = gather.number + 1
            what = f"gathering {gather.chunk.name}"
            if not gather.keeps_shards:
                # Shards that are on NVMe have few slots, which other ranks' one-sided reads need,
                # too. So none is held while this rank waits for the others to come.
                flag = torch.zeros(1, dtype=torch.uint8, device="cpu")
                self.server.peers.begin_any(flag, what, Channel.GATHERS).wait()
            with contextlib.ExitStack() as opened:
                shard: torch.Tensor | None = None
                if error is None:
                    try:
                        shard = opened.enter_context(self._shards.open(gather.chunk))
                    except Exception as failure:
                        error = self._tell_failure(gather, failure)
                if self.transport.gather(gather.target, shard, what, opened, gather.keeps_shards):
                    return None
            missing = PeerError(f"another rank could not give {gather.chunk.name}")
            return error or self._told_failure(gather) or missing
        except PeerClosedError:
            # (A rank that has no values may have closed its engine because of that.)
            error = error or self._told_failure(gather)
            if error is None:
                raise
            return error
        except Exception as failure:
            return failure.with_traceback(None)

    def _tell_failure(self, gather: CommonGather, failure: Exception) -> BaseException:
        """Leaves a note for the others, which find it when this rank comes without values."""
        peers = self.server.peers
        why = f"{peers.name(peers.rank)} could not give {gather.chunk.name}: {name_error(failure)}"
        peers.notes.leave(f"gather/{gather.number}", why)
        return failure.with_traceback(None)

    def _told_failure(self, gather: CommonGather) -> PeerError | None:
        """Why another rank has no values, if it has told that."""
        key, peers = f"gather/{gather.number}", self.server.peers
        found = (peers.notes.find(key, peer) for peer in peers.others)
        return next((PeerError(why) for why in found if why is not None), None)

    def wait(self, gather: CommonGather) -> bool:
        """For CommonGather: until it is made. Returns False if the others do not come."""
        began_s = time.monotonic()
        while not self._comes_soon(gather.ended):
            if self.counts.is_stalled or time.monotonic() - began_s > STALL_S:
                self.counts.stalled_at = self.counts.made
                return False
        return gather.closed is None

    def _comes_soon(self, ended: threading.Event) -> bool:
        """Waits for a moment: a short one if other ranks had to be told a moment ago."""
        often_told = self.counts.started - self.counts.told < _OFTEN_TOLD
        if ended.wait(SOON_S if often_told else LOOK_S):
            return True
        deliver_signals()
        if self.counts.told < self.counts.started:  # the other ranks are told once
            self.counts.told = self.counts.started
            self.server.tell_wanted(self.counts.started)
        return False

    def wait_all(self) -> None:
        """Until all that were started are made, by devices, too, or have failed.

        Raises PeerError if another rank did not come in time, or has closed its engine.
        """
        began_s, ended = time.monotonic(), threading.Event()
        if self.counts.made < self.counts.started:
            self._worker.do(ended.set)  # after them
            while not self._comes_soon(ended):
                waited_s = time.monotonic() - began_s
                if waited_s > self.server.peers.timeout_s:
                    operation = RankOperation(Channel.GATHERS, self.counts.made)
                    what = "the gathers of a step"
                    raise self.server.peers.failure_of_all(operation, what, "timed out", waited_s)
            if self.counts.closed is not None:
                raise copy.copy(self.counts.closed)
        self.transport.finish()

    def abandon(self) -> None:
        """Ends those that are under way, in which other ranks may not take part; idempotent.

        If this rank has no values for one, the others are told that first.
        """
        counts, until_s = self.counts, time.monotonic() + _END_S
        while counts.prepared <= counts.made < counts.started and time.monotonic() < until_s:
            time.sleep(SOON_S)
        if counts.made < counts.started:
            self.server.peers.break_off(Channel.GATHERS)

    def close(self) -> None:
        """abandon(), and ends the thread; idempotent."""
        self.abandon()
        self._worker.close()
        self.transport.close()

    # One rank alone

    def read(self, chunk: int, slot: int) -> OneSidedGather:
        """Starts reading a chunk into the slots from `slot` on, without the other ranks' doing."""
        found = self._layout.chunks[chunk]
        return self.read_alone(found, self._arena.view(slot, found.slots, self.dtype))

    def read_alone(self, chunk: Chunk, whole: torch.Tensor) -> OneSidedGather:
        """read() of a chunk to `whole`, flat."""
        shard, request = self._layout.shard, self.server.request
        replies = [
            request(RequestKind.PARAM, chunk, 0, peer, whole[shard.range(whole.numel(), peer)])
            for peer in self.server.peers.others
        ]
        return OneSidedGather(self, chunk, whole, replies)

    def copy_own(self, chunk: Chunk, whole: torch.Tensor) -> None:
        """For OneSidedGather: copies this rank's shard to its place in `whole`. Raises as that."""
        # A function of its own: a pin on the shard must not last while others are waited for.
        own = whole[self._layout.shard.range(whole.numel())]
        with self._shards.open(chunk) as shard:
            if own.data_ptr() != shard.data_ptr():  # a whole home has it already
                own.copy_(shard)
