"""Requests of one rank to another, as messages between the two; their errors name the other one.

Only what one rank needs alone goes this way. What all ranks do alike are common operations
(hetero/ranks/collectives.py).
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from functools import partialmethod
from typing import Any

import torch

from hetero.ranks.peers import Channel, Peers
from offload.errors import PeerError

_FOREVER = timedelta(days=365)
_TAGS = 1 << 28  # of answers
_REFUSAL_BYTES = 512
# Messages between two ranks use connections of these channels. A limited wait that ends breaks all
# connections of its channel, so requests, which are waited for without a limit, have others.
_REQUESTS, _ANSWERS = Channel.ROUNDS, Channel.CALLS


@dataclass(eq=False)
class Message:
    """A message that is being sent or received; it keeps its tensor alive until wait()."""

    peers: Requests
    work: Any  # gloo's
    tensor: torch.Tensor | None
    peer: int
    what: str

    def wait(self) -> None:
        """Returns when the bytes have been sent or received. Raises PeerError; idempotent."""
        if self.tensor is not None:
            self.peers.wait(self._wait, self.peer, self.what)

    def _wait(self, limit: timedelta) -> None:
        self.work.wait(limit)
        # Here, whatever becomes of who waits: gloo's work must not be waited for twice.
        self.tensor = None


@dataclass(eq=False)
class Reply:
    """The answer to a request: a status, which may be a refusal, and then the content."""

    request: Message | None  # keeps its tensor until the answer has come
    status: Message
    refusal: torch.Tensor
    content: Message

    def wait(self) -> None:
        """Returns when the content has been received. Idempotent.

        Raises PeerError if the other rank failed, or refused.
        """
        self.status.wait()
        self.request = None
        refusal = text_in(self.refusal)
        if refusal:
            raise PeerError(f"{self.status.peers.name(self.status.peer)} refused: {refusal}")
        self.content.wait()


class Requests(Peers):
    """Requests to the other members; each is answered by the other rank's ShardServer.

    A request may be made at any time.
    """

    def __init__(self, *connection: Any) -> None:
        """Connects the members, as Peers does with these arguments."""
        self.sent_bytes = 0  # of gathered chunks and gradients, and of answers to requests
        self.received_bytes = 0
        self._replies = 0
        self._lock = threading.Lock()
        super().__init__(*connection)
        # Messages that nobody answers keep their tensors for a while, until they are sent.
        self._unanswered: deque[Message] = deque(maxlen=4 * self.size)

    def request(self, peer: int, header: torch.Tensor, into: torch.Tensor, what: str) -> Reply:
        """Starts a request to `peer`, whose answer's content goes to `into`.

        `header` is int64, and its last element is set here; `what` names the request in errors.
        Returns the answer on its way. Neither tensor may be used otherwise until it has arrived.
        """
        with self._lock:
            tag = 2 * self._replies % _TAGS
            self._replies += 1
            self.received_bytes += into.nbytes
        header[-1] = tag
        refusal = padded("", _REFUSAL_BYTES)
        status = self._receive(refusal, peer, tag, what)
        content = self._receive(into, peer, tag + 1, what)
        return Reply(self._ask(peer, header), status, refusal, content)

    def next_request(self, peer: int, header: torch.Tensor) -> None:
        """Waits without a limit for a request of `peer`. Raises RuntimeError if `peer` is gone."""
        if not self._groups:
            raise RuntimeError("the connections are closed")
        self._groups[_REQUESTS].recv([as_bytes(header)], peer, 0).wait(_FOREVER)

    def say(self, peer: int, header: torch.Tensor) -> None:
        """Sends `peer` a request that needs no answer. Raises PeerError."""
        self._unanswered.append(self._ask(peer, header))

    def _ask(self, peer: int, header: torch.Tensor) -> Message:
        return self._send(header, peer, 0, "a request", _REQUESTS)

    def reply(self, peer: int, header: torch.Tensor, content: torch.Tensor, what: str) -> None:
        """Answers the request `header`; returns when `content` has been sent. Raises PeerError."""
        with self._lock:
            self.sent_bytes += content.nbytes
        tag = int(header[-1])
        status = self._send(padded("", _REFUSAL_BYTES), peer, tag, what)
        self._send(content, peer, tag + 1, what).wait()
        status.wait()

    def refuse(self, peer: int, header: torch.Tensor, why: str) -> None:
        """Answers the request `header` with an error. Raises PeerError."""
        self._send(padded(why, _REFUSAL_BYTES), peer, int(header[-1]), "an answer").wait()

    def _start(
        self,
        way: str,
        tensor: torch.Tensor,
        peer: int,
        tag: int,
        what: str,
        connection: Channel = _ANSWERS,
    ) -> Message:
        group = self.connection(connection, what)
        try:
            work = getattr(group, way)([as_bytes(tensor)], peer, tag)
        except RuntimeError as error:
            raise self.failure(peer, what, str(error)) from error
        return Message(self, work, tensor, peer, what)

    _send = partialmethod(_start, "send")
    _receive = partialmethod(_start, "recv")

    def close(self) -> None:
        """Drops the connections."""
        self._unanswered.clear()
        super().close()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, because gloo does not know every dtype."""
    return tensor.detach().view(-1).view(torch.uint8)


def padded(text: str, nbytes: int) -> torch.Tensor:
    """`text` as so many bytes, cut or followed by zeros."""
    content = text.encode()[:nbytes].ljust(nbytes, b"\0")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def text_in(padded: torch.Tensor) -> str:
    return padded.numpy().tobytes().rstrip(b"\0").decode(errors="replace")


class GatheredParts:
    """Memory for the parts of all members, in their order, which may be taken away meanwhile."""

    def __init__(self, whole: torch.Tensor | None, size: int) -> None:
        """`whole`, flat, is for the parts of `size` members; None: what comes is not kept."""
        self.lock = threading.Lock()  # guards `rows`, and what is in it
        self.rows = None if whole is None else as_bytes(whole).view(size, -1)

    def let_go(self) -> bool:
        """Nothing is written to the memory any more, so that parts may be missing: True."""
        with self.lock:
            self.rows = None
        return True

    def store(self, begin: int, pieces: torch.Tensor) -> None:
        """Takes bytes of all members' parts, a row each, from byte `begin` of the parts on."""
        with self.lock:
            if self.rows is not None:
                self.rows[:, begin : begin + pieces.shape[1]].copy_(pieces)
