"""What carries the shards of an all-gather from rank to rank, once all ranks have come to it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Protocol

import torch

from hetero.chunks.layout import Chunk, Layout
from hetero.ranks.communicator import Communicator
from hetero.ranks.messages import GatheredParts
from hetero.ranks.peers import Channel


class GatherTarget(Protocol):
    """Memory for a whole chunk, which may be taken away before the chunk is there."""

    def let_go(self) -> bool:
        """Nothing that was not begun is written there. Returns False if all of it will come."""

    def follow(self) -> None:
        """What the calling thread computes from now on comes after the gather, which was made.

        Raises PeerError.
        """


class GatherTransport(Protocol):
    """Brings the shards of all ranks together; which one it is all ranks have decided alike."""

    def target(self, chunk: Chunk, whole: torch.Tensor | None) -> Any:
        """A GatherTarget over `whole`, flat; None: what comes is not kept.

        Called as the gather is started, in the thread that computes.
        """

    def gather(
        self,
        target: Any,
        shard: torch.Tensor | None,
        what: str,
        opened: ExitStack,
        keeps: bool,
    ) -> None:
        """Brings the shards to `target`, which target() has made; all ranks call it.

        When it returns they are there for whatever follows the target. Other ranks may still read
        this one's. Raises PeerError.

        Args:
            target: where to.
            shard: this rank's, flat; None: it has told the others that it has none.
            what: names the gather in errors.
            opened: keeps the shard for the caller; the transport may take that over.
            keeps: this rank may wait for other ranks while it keeps the shard.
        """

    def finish(self) -> None:
        """Until nothing is under way on a device. Raises PeerError."""

    def let_go(self) -> None:
        """All ranks have made the gathers that this rank has: none reads its shards any more."""

    def close(self) -> None:
        """What is gathered from is freed now. Idempotent."""


class _InRam(GatheredParts):
    """GatherTarget, and the elements of one part."""

    def __init__(self, whole: torch.Tensor | None, ranks: int, part_numel: int) -> None:
        super().__init__(whole, ranks)
        self.part_numel = part_numel

    def follow(self) -> None:
        """All is there."""


class RamTransport:
    """Shards come together in RAM, by gloo; wherever they are, and `whole` is."""

    def __init__(self, peers: Communicator, layout: Layout, dtype: torch.dtype) -> None:
        """Of the chunks of `layout`, in `dtype`, over the connections of `peers`."""
        self._peers = peers
        self._layout = layout
        self._dtype = dtype

    def target(self, chunk: Chunk, whole: torch.Tensor | None) -> _InRam:
        numel = self._layout.shard.numel(self._layout.chunk_numel(chunk))
        return _InRam(whole, self._peers.size, numel)

    def gather(
        self,
        target: _InRam,
        shard: torch.Tensor | None,
        what: str,
        opened: ExitStack,
        keeps: bool,
    ) -> None:
        part = torch.zeros(target.part_numel, dtype=self._dtype) if shard is None else shard
        kept = opened if keeps else None
        self._peers.gather_parts(part, target, what, Channel.GATHERS, kept)

    def finish(self) -> None:
        """Nothing is: gather() waits."""

    def let_go(self) -> None:
        self._peers.let_go()

    def close(self) -> None:
        self._peers.retract()
