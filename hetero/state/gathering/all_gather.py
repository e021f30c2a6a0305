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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import torch

from hetero.chunks.layout import Chunk, Layout
from hetero.ranks.collectives import Reply
from hetero.ranks.communicator import Communicator
from hetero.ranks.peers import Channel, PeerClosedError, RankOperation
from hetero.ranks.shard_server import RequestKind, ShardServer, Versions
from hetero.ranks.waiting import LOOK_S, SOON_S, name_error
from hetero.state.chunk_updates import OwnShards
from hetero.state.gathering.transport import GatherTransport
from offload.device.fetch_queue import FetchQueue
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
    """A chunk that all ranks gather: what GatherStream.start() returns."""

    def __init__(
        self,
        stream: GatherStream,
        number: int,
        chunk: Chunk,
        whole: torch.Tensor | None,
        read: Callable[[], object],
        keeps_shards: bool,
    ) -> None:
        """`whole` gets the chunk, flat; None: this rank takes part for the others alone.

        `read` brings it there one-sided. `keeps_shards`: ranks may wait for each other while they
        keep their shards open.
        """
        self._stream = stream
        self.number = number
        self.chunk = chunk
        self.keeps_shards = keeps_shards
        self.error: BaseException | None = None
        self.closed: PeerClosedError | None = None  # it is not made, because a rank has left
        self.ended = threading.Event()
        self.target = stream.transport.target(chunk, whole)
        self._is_kept = whole is not None
        self._read = read
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
                while not self._stream.wait(self):
                    read = self._read  # before letting go: a gather that ends then stores nothing
                    if self.target.let_go():
                        read()
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
                self._stream.wait_s += time.perf_counter() - began_s
                self._let_go(self.error)
        self._raise_error()

    def _raise_error(self) -> None:
        if self.error is not None:
            # A copy: what is raised has the caller's frames, and with them tensors that pin slots.
            raise copy.copy(self.error)

    def end(self, error: BaseException | None, closed: PeerClosedError | None) -> None:
        """For the stream: it is made, or has failed, or a rank has `closed` its engine before."""
        if error is not None:
            self.error = error
        self.closed = closed
        if closed is None:
            self._read = lambda: None  # it refers to no home any more

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
    """How many gathers of a stream are started, and how many are made: they end in their order.

    Attributes:
        started: by this rank.
        prepared: of those, this rank has values, or has told why not.
        made: of those, by all ranks.
        closed: no more are made, because a rank has left; None: they are.
        stalled_at: how many were made when this rank gave up waiting for others.
    """

    started: int = 0
    prepared: int = 0
    made: int = 0
    closed: PeerClosedError | None = None
    stalled_at: int = -1

    @property
    def is_stalled(self) -> bool:
        """Whether this rank waits for others no more, because none has come since it gave up, or
        because one has closed its engine."""
        return self.closed is not None or self.stalled_at == self.made < self.started


class GatherStream:
    """Makes all-gathers in the order in which they are started, the same on all ranks."""

    def __init__(
        self,
        peers: Communicator,
        server: ShardServer,
        shards: OwnShards,
        versions: Versions,
        transport: GatherTransport,
    ) -> None:
        """Nothing is gathered yet.

        Args:
            peers: the ranks of the shard group.
            server: tells them that one of them is waited for.
            shards: this rank's.
            versions: of the chunks' values.
            transport: brings the shards together.
        """
        self._peers = peers
        self._server = server
        self._shards = shards
        self._versions = versions
        self.transport = transport
        self._worker = Worker("gathers")
        self.counts = GatherCounts()
        self._told = -_OFTEN_TOLD  # the others were told that so many were started
        self.wait_s = 0.0  # seconds of waiting for them
        self._digest = blake2b(digest_size=7)
        self._all_in_ram = False

    def note_homes(self, all_in_ram: bool) -> None:
        """Whether every rank has all of its shards in memory, for gathers that are started later.

        All ranks call it. Until the first call they are taken not to have.
        """
        self._all_in_ram = all_in_ram

    def start(
        self,
        chunk: Chunk,
        whole: torch.Tensor | None = None,
        read: Callable[[], object] = lambda: None,
    ) -> CommonGather:
        """Starts gathering `chunk` to `whole`, flat, where this rank's shard may be already.

        Without `whole` this rank takes part for the others alone. `read` brings the chunk there
        one-sided, if others do not come.
        """
        gather = CommonGather(self, self.counts.started, chunk, whole, read, self._all_in_ram)
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
                flag = torch.zeros(1, dtype=torch.uint8)
                self._peers.begin_any(flag, what, Channel.GATHERS).wait()
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
        name = self._peers.name(self._peers.rank)
        why = f"{name} could not give {gather.chunk.name}: {name_error(failure)}"
        self._peers.notes.leave(f"gather/{gather.number}", why)
        return failure.with_traceback(None)

    def _told_failure(self, gather: CommonGather) -> PeerError | None:
        """Why another rank has no values, if it has told that."""
        key, find = f"gather/{gather.number}", self._peers.notes.find
        found = (find(key, peer) for peer in self._peers.others)
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
        often_told = self.counts.started - self._told < _OFTEN_TOLD
        if ended.wait(SOON_S if often_told else LOOK_S):
            return True
        deliver_signals()
        self._tell_wanted()
        return False

    def _tell_wanted(self) -> None:
        """Tells the other ranks, once, that this one waits for what it has started."""
        if self._told < self.counts.started:
            self._told = self.counts.started
            self._server.tell_wanted(self.counts.started)

    def wait_all(self) -> None:
        """Until all that were started are made, by devices, too, or have failed.

        Raises PeerError if another rank did not come in time, or has closed its engine.
        """
        began_s, ended = time.monotonic(), threading.Event()
        if self.counts.made < self.counts.started:
            self._worker.do(ended.set)  # after them
            while not self._comes_soon(ended):
                waited_s = time.monotonic() - began_s
                if waited_s > self._peers.timeout_s:
                    operation = RankOperation(Channel.GATHERS, self.counts.made)
                    what = "the gathers of a step"
                    raise self._peers.failure_of_all(operation, what, "timed out", waited_s)
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
            self._peers.break_off(Channel.GATHERS)

    def close(self) -> None:
        """abandon(), and ends the thread; idempotent."""
        self.abandon()
        self._worker.close()
        self.transport.close()


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
        self.gathering.one_sided_wait_s += time.perf_counter() - started

    def cancel(self) -> None:
        """No-op: the other ranks' shards come anyway, so wait() must be called."""


class Gathering:
    """Starts gathers of one chunk group; a Backing of gathered copies.

    Attributes:
        server: asks the other ranks for their shards, and answers them.
        stream: makes the all-gathers that all ranks make.
    """

    def __init__(
        self,
        layout: Layout,
        server: ShardServer,
        shards: OwnShards,
        stream: GatherStream,
        arena: HostArena,
        dtype: torch.dtype,
    ) -> None:
        """Nothing is gathered yet.

        Args:
            layout: the chunk group's.
            server: of the ranks of the shard group.
            shards: this rank's.
            stream: of the same ranks.
            arena: has the slots of gathered copies, in RAM: none in stages 1 and 2.
            dtype: of parameters.
        """
        self._layout = layout
        self.server = server
        self._shards = shards
        self._arena = arena
        self._dtype = dtype
        self.one_sided_wait_s = 0.0
        self.stream = stream
        # The chunk and the thread of the block of together(): other reads are of this rank alone.
        self._common: tuple[int, int] | None = None

    @property
    def wait_s(self) -> float:
        """Seconds of waiting, which prefetch did not hide."""
        return self.one_sided_wait_s + self.stream.wait_s

    @property
    def has_all_in_ram(self) -> bool:
        """Whether all shards of this rank are at home in memory."""
        return all(chunk in self._shards.homes for chunk in self._layout.chunks)

    def read(self, chunk: int, slot: int) -> Operation:
        """Starts gathering a chunk into the slots from `slot` on, as together() says."""
        found = self._layout.chunks[chunk]
        whole = self._arena.view(slot, found.slots, self._dtype)
        return self.start(found, whole) if self.is_common(chunk) else self.read_alone(found, whole)

    @contextlib.contextmanager
    def together(self, chunk: int) -> Iterator[None]:
        """Inside the block this thread's read() of the chunk is an all-gather of all ranks."""
        self._common = chunk, threading.get_ident()
        try:
            yield
        finally:
            self._common = None

    def is_common(self, chunk: int) -> bool:
        """Whether the chunk is read in the block of together()."""
        return self._common == (chunk, threading.get_ident())

    def start(self, chunk: Chunk, whole: torch.Tensor) -> CommonGather:
        """Starts gathering a chunk to `whole`, flat, with all ranks."""
        return self.stream.start(chunk, whole, lambda: self.read_alone(chunk, whole).wait())

    def read_alone(self, chunk: Chunk, whole: torch.Tensor) -> OneSidedGather:
        """Starts reading a chunk to `whole`, flat, without the other ranks' doing."""
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


class DeviceGathers:
    """Fills slots of the device, with all ranks or one-sided: the Backing of a cache there."""

    def __init__(
        self, gathering: Gathering, arena: HostArena, layout: Layout, fetches: FetchQueue
    ) -> None:
        """
        Args:
            gathering: its stream gathers to the device.
            arena: the device's slots.
            layout: of the chunks.
            fetches: brings what is read one-sided, through RAM.
        """
        self._gathering = gathering
        self._arena = arena
        self._layout = layout
        self._fetches = fetches

    def read(self, chunk: int, slot: int) -> Operation:
        """Starts bringing a chunk to the slots from `slot` on, as Gathering.together() says."""
        if not self._gathering.is_common(chunk):
            return self._fetches.read(chunk, slot)
        found = self._layout.chunks[chunk]
        whole = self._arena.view(slot, found.slots, torch.uint8)
        read_alone = lambda: self._fetches.read(chunk, slot).wait()  # noqa: E731
        return self._gathering.stream.start(found, whole, read_alone)
