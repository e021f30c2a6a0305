"""One-sided gathers: each rank answers requests for its shards from a thread, at any time.

A rank that needs a chunk requests the other ranks' shards, and their threads answer whatever their
programs are doing. So ranks need not run the same modules, generate the same number of tokens or
evaluate at the same time. Only what changes values (backward, step, load_state_dict,
gathered(modifier_rank=...)) must be called by all ranks.

A request names the version of the values that it expects: the number of changes, which all ranks
make alike. The answer waits until the answering rank has made as many. If that rank has made more,
the ranks do not make the same calls, which is an error on both.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from hetero.chunks.layout import Chunk, Layout
from hetero.ranks.collectives import Collectives, Reply
from offload.errors import HeteroError, PeerError
from offload.interrupts import deliver_signals
from offload.memory.operation import Worker

_LOOK_S = 0.01  # how often close() looks whether it is done
_END_S = 5.0  # for threads whose connections are broken off to end
_HEADER = 5  # kind, chunk, tile, version, tag


class RequestKind(enum.IntEnum):
    """The content that a request asks for."""

    PARAM = 1  # the shard of a chunk's parameters
    OPTIM_STATE = 2  # one tile's optimizer state
    BYE = 3  # none: the rank that sends it makes no more requests
    WANTED = 4  # none: it waits for other ranks in an all-gather of all; how many it has started


class Versions:
    """Counts the changes of each chunk's values, and those that other ranks may see.

    A change begins with change() and ends with publish(); in between requests wait.
    """

    def __init__(self, chunks: int) -> None:
        self._current = [0] * chunks
        self._published = [0] * chunks
        self._changed = threading.Condition()
        self._ended: str | None = None

    def __getitem__(self, chunk: Chunk) -> int:
        return self._current[chunk.id]

    def change(self, chunk: Chunk) -> None:
        """The chunk's values are about to change: answers wait until publish()."""
        self._current[chunk.id] += 1

    def publish(self, chunk: Chunk) -> None:
        """The chunk's values are final: answers may have them."""
        with self._changed:
            self._published[chunk.id] = self._current[chunk.id]
            self._changed.notify_all()

    def wait_for(self, chunk: Chunk, version: int) -> None:
        """Until the chunk is at `version`. Raises HeteroError if it is past it, or after end()."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._published[chunk.id] >= version or self._ended is not None
            )
            if self._published[chunk.id] > version:
                raise HeteroError(
                    f"{chunk.name} has been changed {self._published[chunk.id]} times here and "
                    f"{version} times there; step(), load_state_dict() and gathered(modifier_rank) "
                    f"must run on all ranks"
                )
            if self._ended is not None:
                raise HeteroError(self._ended)

    def end(self, why: str) -> None:
        """Ends all waits, now and later, with a HeteroError that says `why`."""
        with self._changed:
            self._ended = why
            self._changed.notify_all()


class ShardServer:
    """Answers requests for this rank's shards, and makes requests to the other ranks.

    There is one thread for each other rank of the shard group.

    Attributes:
        wanted: so many all-gathers of all ranks have been started by a rank that waits for this
            one.
    """

    def __init__(
        self,
        peers: Collectives,
        layout: Layout,
        versions: Versions,
        param: Callable[[Chunk], AbstractContextManager[torch.Tensor]],
        optim_state: Callable[[Chunk, int], AbstractContextManager[torch.Tensor]],
    ) -> None:
        """Starts answering the `peers`, the ranks of the shard group.

        `param` makes a context with this rank's shard of a chunk's parameters, flat; `optim_state`
        one with the bytes of one tile's optimizer state.
        """
        self.peers = peers
        self.wanted = 0
        self._lock = threading.Lock()  # guards it
        self._layout = layout
        self._versions = versions
        self._param = param
        self._optim_state = optim_state
        self._closing = False
        self._serving = set(peers.others)  # those that may still make requests
        self._workers = [
            Worker(f"shards-{peer}", idle_s=0.0, end=peers.break_off) for peer in peers.others
        ]
        for worker, peer in zip(self._workers, peers.others, strict=True):
            worker.do(partial(self._serve, peer))

    def request(
        self, kind: RequestKind, chunk: Chunk, tile: int, peer: int, into: torch.Tensor
    ) -> Reply:
        """Starts a request to `peer` for values of the version that this rank has.

        `tile` is its number in `peer`'s shard, for OPTIM_STATE; `into`, flat, is where the content
        goes. Returns the answer on its way. Raises PeerError if `peer` is gone.
        """
        header = torch.tensor([kind, chunk.id, tile, self._versions[chunk], 0], device="cpu")
        return self.peers.request(peer, header, into, f"gathering {chunk.name}")

    def tell_wanted(self, gathers: int) -> None:
        """Tells the others that this rank, which has started so many, waits in an all-gather."""
        for peer in self.peers.others:
            with contextlib.suppress(PeerError):  # it is gone, which the wait meets
                self.peers.say(
                    peer, torch.tensor([RequestKind.WANTED, 0, gathers, 0, 0], device="cpu")
                )

    def _serve(self, peer: int) -> None:
        try:
            self._answer_all(peer)
        finally:
            self._serving.discard(peer)

    def _answer_all(self, peer: int) -> None:
        header = torch.zeros(_HEADER, dtype=torch.int64, device="cpu")
        while True:
            try:
                self.peers.next_request(peer, header)
            except RuntimeError as error:
                if not self._closing:
                    self.peers.failure(peer, "training", str(error))
                return
            if header[0] == RequestKind.BYE:
                return
            if header[0] == RequestKind.WANTED:
                with self._lock:
                    self.wanted = max(self.wanted, int(header[2]))
                continue
            try:
                self._answer(peer, header)
            except PeerError:
                return  # the failure is noted, and the program's own wait meets it

    def _answer(self, peer: int, header: torch.Tensor) -> None:
        kind, chunk_id, tile, version, _ = header.tolist()
        chunk = self._layout.chunks[chunk_id]
        try:
            self._versions.wait_for(chunk, version)
            is_param = kind == RequestKind.PARAM
            with self._param(chunk) if is_param else self._optim_state(chunk, tile) as content:
                # (gloo sends from RAM; what is at home on a device is copied.)
                self.peers.reply(peer, header, content.cpu(), f"giving {chunk.name}")
        except PeerError:
            raise
        except Exception as error:  # any error at all must reach the rank that asked
            self.peers.refuse(peer, header, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Answers until no rank makes requests any more; idempotent.

        Ranks that go on computing are waited for, up to rank_timeout_s, unless a rank has failed or
        this one has ended.
        """
        try:
            self._say_bye()
            deadline = time.monotonic() + self.peers.timeout_s
            while self._is_needed() and time.monotonic() < deadline:
                deliver_signals()
                time.sleep(_LOOK_S)
        finally:
            self._versions.end("the engine was closed")
            if self._serving:
                self.peers.break_off()
            until = time.monotonic() + _END_S
            for worker in self._workers:
                worker.close(max(0.0, until - time.monotonic()))

    def _say_bye(self) -> None:
        if self._closing:
            return
        self._closing = True
        for peer in self.peers.others:
            with contextlib.suppress(PeerError):  # it is gone
                self.peers.say(peer, torch.tensor([RequestKind.BYE, 0, 0, 0, 0], device="cpu"))

    def _is_needed(self) -> bool:
        """Whether some rank may still make requests that can be answered."""
        failures = self.peers.failures
        if failures.first is not None or failures.own_end is not None:
            return False
        return bool(self._serving)
