"""Whole chunks from the shards of all ranks: gathered by all of them, or read by one alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hetero.chunks.layout import Chunk, Layout
from hetero.ranks.messages import Reply
from hetero.ranks.shard_server import RequestKind, ShardServer
from hetero.state.gathering.gather_stream import CommonGather, GatherStream
from hetero.state.gathering.param_shards import ParamShards
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
        expected: chunks of which all ranks are about to make an all-gather.
    """

    def __init__(
        self,
        layout: Layout,
        server: ShardServer,
        shards: ParamShards,
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
        self.expected: set[int] = set()

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
        if self.take_expected(chunk):
            return self.start(found, whole)
        return self.read_alone(found, whole)

    def take_expected(self, chunk: int) -> bool:
        """Whether all ranks are about to gather the chunk; it is not expected again."""
        is_expected = chunk in self.expected
        self.expected.discard(chunk)
        return is_expected

    def start(self, chunk: Chunk, whole: torch.Tensor) -> CommonGather:
        """Starts gathering a chunk to `whole`, flat, with all ranks."""
        return self.stream.start(chunk, whole, lambda: self.read_alone(chunk, whole).wait())

    def write(self, chunk: int, slot: int) -> Operation:
        """Not used: gathered copies are never changed."""
        raise AssertionError("gathered copies are never written")

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
