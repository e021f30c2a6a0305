"""The all-gather: whole chunks from the shards of all ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch

from hetero.chunks.layout import Chunk, Layout
from hetero.ranks.messages import Reply
from hetero.ranks.shard_server import RequestKind, ShardServer
from hetero.state.param_shards import ParamShards
from offload.memory.arena import HostArena
from offload.memory.operation import Operation


class Gather:
    """A chunk whose shards are on their way; wait() copies this rank's own.

    The other ranks' shards arrive in the memory without this rank's doing.
    """

    def __init__(
        self,
        whole: torch.Tensor,
        chunk: Chunk,
        shards: ParamShards,
        replies: Sequence[Reply],
        mine: slice,
        waited: Callable[[float], None],
    ) -> None:
        """A gather that has begun.

        Args:
            whole: where to, flat, the whole chunk.
            replies: those of the other ranks, each of which fills its part of `whole`.
            mine: the elements of `whole` that are this rank's shard.
            waited: called with the seconds that wait() took.
        """
        self._whole: torch.Tensor | None = whole
        self._chunk = chunk
        self._shards = shards
        self._replies = replies
        self._mine = mine
        self._waited = waited
        self._lock = threading.Lock()  # copies to a device are waited for in another thread

    def wait(self) -> None:
        """Waits until the chunk is whole.

        Raises:
            PeerError: another rank's shard did not come.
            BudgetError, NativeIoError: this rank's shard cannot be read.
        """
        with self._lock:
            if self._whole is not None:
                self._wait()

    def _wait(self) -> None:
        assert self._whole is not None
        started = time.perf_counter()
        try:
            self._copy_own(self._whole[self._mine])
        finally:
            # Also after an error: nothing may arrive once the memory has another use.
            for reply in self._replies:
                reply.wait()
        self._whole = None
        self._waited(time.perf_counter() - started)

    def _copy_own(self, own: torch.Tensor) -> None:
        # A function of its own: a pin on the shard must not last while others are waited for.
        with self._shards.open(self._chunk) as shard:
            if own.data_ptr() != shard.data_ptr():  # a whole home has it already
                own.copy_(shard)

    def cancel(self) -> None:
        """No-op: the other ranks' shards come anyway, so wait() must be called."""


class Gathering:
    """Starts all-gathers; a Backing of gathered copies."""

    def __init__(
        self,
        layout: Layout,
        server: ShardServer,
        shards: ParamShards,
        arena: HostArena | None,
        dtype: torch.dtype,
    ) -> None:
        """All-gathers of one chunk group.

        Args:
            server: answers the other ranks, and asks them for their shards.
            shards: this rank's.
            arena: the slots of gathered copies; None if there are none (stages 1 and 2).
            dtype: of the parameters.
        """
        self._layout = layout
        self._server = server
        self._shards = shards
        self._arena = arena
        self._dtype = dtype
        self.wait_s = 0.0  # seconds of waiting, which prefetch did not hide

    def read(self, chunk: int, slot: int) -> Operation:
        """Starts gathering a chunk into the slots from `slot` on."""
        assert self._arena is not None
        found = self._layout.chunks[chunk]
        return self.gather(found, self._arena.view(slot, found.slots, self._dtype))

    def write(self, chunk: int, slot: int) -> Operation:
        """Not used: gathered copies are never changed."""
        raise AssertionError("gathered copies are never written")

    def gather(self, chunk: Chunk, whole: torch.Tensor) -> Gather:
        """Starts gathering a chunk.

        Args:
            whole: where to, flat, the whole chunk; this rank's shard may be there already.
        """
        shard = self._layout.shard
        replies = [
            self._server.request(
                RequestKind.PARAM, chunk, 0, peer, whole[shard.range(whole.numel(), peer)]
            )
            for peer in self._server.peers.others
        ]
        mine = shard.range(whole.numel())
        return Gather(whole, chunk, self._shards, replies, mine, self._add_wait)

    def _add_wait(self, waited_s: float) -> None:
        self.wait_s += waited_s
