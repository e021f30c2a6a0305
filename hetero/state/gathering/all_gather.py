"""Whole chunks from the shards of all ranks: gathered by all of them, or read by one alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from hetero.chunks.layout import Chunk, Layout
from hetero.ranks.messages import Reply
from hetero.ranks.shard_server import RequestKind, ShardServer
from hetero.ranks.waiting import LOOK_S
from hetero.state.gathering.gather_stream import CommonGather, GatherStream
from hetero.state.gathering.own_shards import OwnShards
from offload.interrupts import deliver_signals
from offload.memory.arena import HostArena
from offload.memory.operation import Operation


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
        # Chunks of which all ranks are about to make an all-gather, which this one has begun, and
        # told when one is started. Reads that need room in RAM are started by other threads.
        self._expected: set[int] = set()
        self._changed = threading.Condition()

    @property
    def wait_s(self) -> float:
        """Seconds of waiting, which prefetch did not hide."""
        return self.one_sided_wait_s + self.stream.wait_s

    @property
    def has_all_in_ram(self) -> bool:
        """Whether all shards of this rank are at home in memory."""
        return all(chunk in self._shards.homes for chunk in self._layout.chunks)

    def read(self, chunk: int, slot: int) -> Operation:
        """Starts gathering a chunk into the slots from `slot` on, with all ranks if expected."""
        found = self._layout.chunks[chunk]
        whole = self._arena.view(slot, found.slots, self._dtype)
        started = self.start_expected(chunk, lambda: self.start(found, whole))
        return self.read_alone(found, whole) if started is None else started

    def expect(self, chunk: int, must: bool) -> bool:
        """All ranks are about to make an all-gather of the chunk: its next read() takes part.

        One of the same chunk may not have been started yet. If this is a `must` it is waited for,
        as in take_part(), and else this returns False.
        """
        with self._changed:
            if chunk in self._expected and not must:
                return False
            self._wait_until(lambda: chunk not in self._expected)
            self._expected.add(chunk)
            return True

    def forget_expected(self, chunk: int) -> None:
        """The chunk's next read() is of this rank alone; idempotent."""
        with self._changed:
            self._expected.discard(chunk)
            self._changed.notify_all()

    def start_expected(self, chunk: int, start: Callable[[], CommonGather]) -> CommonGather | None:
        """What `start` gives, if all ranks are about to gather the chunk; else None."""
        with self._changed:
            if chunk not in self._expected:
                return None
            started = start()
            self.forget_expected(chunk)
            return started

    def take_part(self, chunk: Chunk, must: bool) -> bool:
        """Starts an all-gather of a chunk that this rank does not keep, after those expected.

        These may have no room in RAM yet, through which they go to a device. If it is a `must`,
        this waits until they have been started: others that are under way end, and give them room.
        Else it returns False.
        """
        with self._changed:
            if self._expected and not must:
                return False
            self._wait_until(lambda: not self._expected)
            self.stream.start(chunk)
        return True

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        """Until it is so. Holds the lock."""
        while not self._changed.wait_for(is_so, LOOK_S):
            deliver_signals()

    def is_common(self, chunk: int) -> bool:
        """Whether all ranks are about to gather the chunk."""
        return chunk in self._expected

    def leave_out(self, chunk: int) -> None:
        """In the place of read(): this rank takes part in the gather for the others alone."""
        self.start_expected(chunk, lambda: self.stream.start(self._layout.chunks[chunk]))

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
