"""The all-gather: whole chunks from the shards of all ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hetero.chunks.layout import Chunk, Layout
from hetero.ranks.messages import Reply
from hetero.ranks.shard_server import RequestKind, ShardServer
from hetero.state.param_shards import ParamShards
from offload.memory.arena import HostArena
from offload.memory.operation import Operation


@dataclass(eq=False)
class Gather:
    """A chunk whose shards are on their way; wait() copies this rank's own.

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


@dataclass(eq=False)
class Gathering:
    """Starts all-gathers of one chunk group; a Backing of gathered copies.

    `shards` are this rank's; `server` asks the other ranks for theirs. `arena` has the slots of
    gathered copies, in RAM: none in stages 1 and 2.
    """

    layout: Layout
    server: ShardServer
    shards: ParamShards
    arena: HostArena
    dtype: torch.dtype
    wait_s: float = 0.0  # seconds of waiting, which prefetch did not hide

    def read(self, chunk: int, slot: int) -> Operation:
        """Starts gathering a chunk into the slots from `slot` on."""
        found = self.layout.chunks[chunk]
        return self.gather(found, self.arena.view(slot, found.slots, self.dtype))

    def write(self, chunk: int, slot: int) -> Operation:
        """Not used: gathered copies are never changed."""
        raise AssertionError("gathered copies are never written")

    def gather(self, chunk: Chunk, whole: torch.Tensor) -> Gather:
        """Starts gathering a chunk to `whole`, flat, where this rank's shard may be already."""
        shard, request = self.layout.shard, self.server.request
        replies = [
            request(RequestKind.PARAM, chunk, 0, peer, whole[shard.range(whole.numel(), peer)])
            for peer in self.server.peers.others
        ]
        return Gather(self, chunk, whole, replies)

    def copy_own(self, chunk: Chunk, whole: torch.Tensor) -> None:
        """For Gather: copies this rank's shard to its place in `whole`. Raises as Gather.wait()."""
        # A function of its own: a pin on the shard must not last while others are waited for.
        own = whole[self.layout.shard.range(whole.numel())]
        with self.shards.open(chunk) as shard:
            if own.data_ptr() != shard.data_ptr():  # a whole home has it already
                own.copy_(shard)
