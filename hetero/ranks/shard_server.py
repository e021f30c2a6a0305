"""What this rank answers to others, at any time: its shards.

A rank that needs a chunk asks the others for their shards, and each answers from a thread of its
own, whatever its program is doing. So ranks need not run the same modules, generate the same number
of tokens or evaluate at the same time. Only what changes values (backward, step, load_state_dict,
gathered(modifier_rank=...)) is done by all together.

A request names the version of the values that it expects, counted in changes that all ranks make.
It waits until this rank has made as many; if it has made more, the ranks do not do the same, and
that is an error on both.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from hetero.chunks.layout import Chunk, Layout
from hetero.ranks.messages import Communicator, Reply
from offload.errors import HeteroError, PeerError

_HEADER = 5  # kind, chunk, tile, version, tag


class RequestKind(enum.IntEnum):
    """What a request is for."""

    PARAM = 1  # the shard of a chunk's parameters
    OPTIM_STATE = 2  # one tile's optimizer state
    BYE = 3  # nothing: this rank will ask no more


class Versions:
    """How often each chunk's values have changed, and up to where others may see them."""

    def __init__(self, chunks: int) -> None:
        self._current = [0] * chunks
        self._published = [0] * chunks
        self._changed = threading.Condition()
        self._ended: str | None = None

    def __getitem__(self, chunk: Chunk) -> int:
        return self._current[chunk.id]

    def change(self, chunk: Chunk) -> None:
        """The values are about to change; nobody is told them until publish()."""
        self._current[chunk.id] += 1

    def publish(self, chunk: Chunk) -> None:
        """The values are final."""
        with self._changed:
            self._published[chunk.id] = self._current[chunk.id]
            self._changed.notify_all()

    def wait_for(self, chunk: Chunk, version: int) -> None:
        """Until the chunk is at `version`. Raises HeteroError if it is past it or it all ended."""
        with self._changed:
            while self._published[chunk.id] < version and self._ended is None:
                self._changed.wait()
            if self._published[chunk.id] > version:
                raise HeteroError(
                    f"{chunk.name} has been changed {self._published[chunk.id]} times here and "
                    f"{version} times there; step(), load_state_dict() and gathered(modifier_rank) "
                    f"must run on all ranks"
                )
            if self._ended is not None:
                raise HeteroError(self._ended)

    def end(self, why: str) -> None:
        """Ends all waits with an error."""
        with self._changed:
            self._ended = why
            self._changed.notify_all()


class ShardServer:
    """Answers every other rank's requests, each in a thread; asks them in turn."""

    def __init__(
        self,
        peers: Communicator,
        layout: Layout,
        versions: Versions,
        param: Callable[[Chunk], AbstractContextManager[torch.Tensor]],
        optim_state: Callable[[Chunk, int], AbstractContextManager[torch.Tensor]],
    ) -> None:
        """param(chunk) and optimizer state(chunk, tile) give this rank's shard or optimizer state
        inside a block.
        """
        self._peers = peers
        self._layout = layout
        self._versions = versions
        self._param = param
        self._optim_state = optim_state
        self._closing = False
        self._threads = [
            threading.Thread(
                target=self._serve, args=(peer,), name=f"hetero-shards-{peer}", daemon=True
            )
            for peer in peers.others
        ]
        for thread in self._threads:
            thread.start()

    @property
    def peers(self) -> Communicator:
        """Whom it serves."""
        return self._peers

    def request(
        self, kind: RequestKind, chunk: Chunk, tile: int, peer: int, into: torch.Tensor
    ) -> Reply:
        """Starts fetching what `peer` has, at this rank's version, to `into`."""
        header = torch.tensor([kind, chunk.id, tile, self._versions[chunk], 0])
        return self._peers.request(peer, header, into, f"gathering {chunk.name}")

    def _serve(self, peer: int) -> None:
        header = torch.zeros(_HEADER, dtype=torch.int64)
        while True:
            try:
                self._peers.next_request(peer, header)
            except RuntimeError as error:
                if not self._closing:
                    self._peers.failure(peer, "training", str(error))
                return
            if header[0] == RequestKind.BYE:
                return
            try:
                self._answer(peer, header)
            except PeerError:
                return  # it was noted, and the program meets it too

    def _answer(self, peer: int, header: torch.Tensor) -> None:
        kind, chunk_id, tile, version, _ = header.tolist()
        chunk = self._layout.chunks[chunk_id]
        try:
            self._versions.wait_for(chunk, version)
            source = (
                self._param(chunk) if kind == RequestKind.PARAM else self._optim_state(chunk, tile)
            )
            with source as content:
                self._peers.reply(peer, header, content, f"giving {chunk.name}")
        except PeerError:
            raise
        except Exception as error:  # whatever it is, the one who asked must learn of it
            self._peers.refuse(peer, header, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Answers until no rank will ask any more; idempotent.

        A rank that failed is not waited for; one that goes on computing is, up to rank_timeout_s.
        """
        if self._closing:
            return
        self._closing = True
        for peer in self._peers.others:
            with contextlib.suppress(PeerError):  # it is gone
                self._peers.say(peer, torch.tensor([RequestKind.BYE, 0, 0, 0, 0]))
        for thread in self._threads:
            thread.join(0.0 if self._peers.failures.first else self._peers.timeout_s)
        self._versions.end("the engine was closed")
