"""Messages between the ranks of a process group; every wait for one may fail, naming a rank.

All that ranks do together is made of point-to-point messages, so that an error names the rank that
did not take part, and bytes are counted where they are sent. gloo carries them, over connections
that no other code uses.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from offload.errors import HeteroError, PeerError

_FOREVER = timedelta(days=365)
_TAGS = 1 << 28  # tags of requested and of common messages are kept apart by this
_REFUSAL_BYTES = 512
_TITLE_BYTES = 160  # of the text that says what a common operation is
_groups_made: dict[tuple[int, ...], int] = {}  # by their ranks; the numbers agree on all ranks


class Channel(enum.IntEnum):
    """An independent sequence of common operations.

    Within a channel all ranks make the same operations in the same order. The order between
    operations of different channels may differ between ranks.
    """

    CALLS = 0  # calls of the program; each is headed by what it is, so that a mismatch is an error
    GRADIENTS = 1  # gradients of chunks, in a round's order of sending
    ROUNDS = 2  # the beginning of a round


class FailedRanks:
    """The ranks that are known to have failed, the first to be known first.

    All communicators of an engine share one, so that errors can name the first cause.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._why: dict[int, str] = {}

    def note(self, rank: int, why: str) -> None:
        """Notes that rank `rank` (in the world) failed; `why` is a sentence for an error."""
        with self._lock:
            self._why.setdefault(rank, why)

    @property
    def first(self) -> tuple[int, str] | None:
        """The rank that was the first to be known, and why it failed; None if none failed."""
        with self._lock:
            return next(iter(self._why.items()), None)


@dataclass(eq=False)
class Message:
    """A message that is being sent or received; it keeps its tensor alive until wait()."""

    peers: Communicator
    work: Any  # gloo's
    tensor: torch.Tensor | None
    peer: int
    what: str

    def wait(self) -> None:
        """Returns when the bytes have been sent or received. Raises PeerError; idempotent."""
        if self.tensor is not None:
            self.peers.wait(self.work, self.peer, self.what)
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
        refusal = _text(self.refusal)
        if refusal:
            raise PeerError(f"{self.status.peers.name(self.status.peer)} refused: {refusal}")
        self.content.wait()


@dataclass(frozen=True)
class AllToAll:
    """The messages of one Communicator.all_to_all()."""

    messages: Sequence[Message]

    def wait(self) -> None:
        """Returns when all have been sent and received. Raises PeerError; idempotent."""
        for message in self.messages:
            message.wait()


class Communicator:
    """Connects this rank with the other members of one group of ranks.

    `rank`, `size` and every `peer` count within the group; `ranks` are the members' ranks in the
    world, as users know them. Common operations must be called by all members, those of a channel
    in the same order. A request may be made at any time and is answered by the other rank's
    ShardServer.
    """

    def __init__(self, ranks: Sequence[int], timeout_s: float, failures: FailedRanks) -> None:
        """Connects the members. All of them must call this.

        Args:
            ranks: the members' ranks in the world; this process is one of them.
            timeout_s: limit of each wait for another member.
            failures: where failed ranks are noted.

        Raises PeerError if a member did not come in time.
        """
        self.ranks = tuple(ranks)
        self.size = len(ranks)
        self.rank = self.ranks.index(self._world_rank())
        self.others = [peer for peer in range(self.size) if peer != self.rank]
        self.failures = failures
        self.timeout_s = timeout_s
        self.sent_bytes = 0  # of gradients, and of answers to requests
        self.received_bytes = 0
        self._operations = dict.fromkeys(Channel, 0)
        self._replies = 0
        self._lock = threading.Lock()
        self._unanswered: list[Message] = []  # keep their tensors until close()

        self._group, self._requests = self._connect()

    def _world_rank(self) -> int:
        return dist.get_rank()

    def _connect(self) -> tuple[Any, Any]:
        """Makes the connections for data and for requests."""
        number = _groups_made.get(self.ranks, 0)
        _groups_made[self.ranks] = number + 1
        # Made directly: groups by dist.new_group() have names that are used again after they
        # were destroyed, with the addresses of the old ones still in the store.
        store = dist.distributed_c10d.PrefixStore(
            f"hetero/{'-'.join(map(str, self.ranks))}/{number}",
            dist.distributed_c10d._get_default_store(),
        )
        self._meet(store)

        def group(purpose: str) -> Any:
            return dist.ProcessGroupGloo(
                dist.distributed_c10d.PrefixStore(purpose, store),
                self.rank,
                self.size,
                timedelta(seconds=self.timeout_s),
            )

        return group("data"), group("requests")

    def _meet(self, store: Any) -> None:
        """Returns when all members have come; gloo's own error would not name the missing rank."""
        store.set(f"here/{self.rank}", "")
        started = time.monotonic()
        for peer in self.others:
            left_s = max(0.001, self.timeout_s - (time.monotonic() - started))
            try:
                store.wait([f"here/{peer}"], timedelta(seconds=left_s))
            except RuntimeError as error:
                waited_s = time.monotonic() - started
                raise self.failure(peer, "hetero's start", str(error), waited_s) from error

    def name(self, peer: int) -> str:
        """A member's name as users know it: "rank 3" of the world."""
        return f"rank {self.ranks[peer]}"

    def wait(self, work: Any, peer: int, what: str) -> None:
        """Waits for one transfer with `peer`, which `what` names in the error. Raises PeerError."""
        started = time.perf_counter()
        try:
            work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            waited_s = time.perf_counter() - started
            raise self.failure(peer, what, str(error), waited_s) from error

    def failure(self, peer: int, what: str, why: str, waited_s: float = 0.0) -> PeerError:
        """The error for a failed transfer with `peer`; it names the first failure too, if known."""
        if "imed out" in why or "timeout" in why:
            fact = (
                f"{self.name(peer)} did not take part in {what} within {waited_s:.0f} s; it hangs, "
                f"is much slower, or runs other code than {self.name(self.rank)}. All ranks must "
                f"make the same calls; raise rank_timeout_s (now {self.timeout_s:g}) if it is "
                f"only slow"
            )
        else:
            fact = f"{self.name(peer)} is gone (during {what}): look at its own error"
        self.failures.note(self.ranks[peer], fact)
        first = self.failures.first
        assert first is not None
        cause = "" if first[0] == self.ranks[peer] else f"; before that: {first[1]}"
        return PeerError(f"{fact}{cause}")

    # Common operations

    def all_to_all(
        self,
        sends: Sequence[torch.Tensor | None],
        receives: Sequence[torch.Tensor | None],
        what: str,
        channel: Channel = Channel.CALLS,
    ) -> AllToAll:
        """Starts sending one tensor to, and receiving one from, every other member.

        Args:
            sends: by member, what it gets; None: nothing. This rank's own element is not used.
            receives: by member, where its tensor goes; None: it sends nothing.
            what: names the operation in errors; the same on all members.
            channel: the sequence that it is part of.

        Returns the messages on their way. No tensor may be used otherwise until they have arrived.
        Raises PeerError, and HeteroError if another member makes a different call (CALLS only).
        """
        tag = self._next_tag(channel)
        receiving = {p: into for p in self.others if (into := receives[p]) is not None}
        sending = {p: part for p in self.others if (part := sends[p]) is not None}
        messages = []
        if channel is Channel.CALLS:
            # gloo ends the process that gets more bytes than it expects.
            messages += self._announce(sending, receiving, what)
        messages += [self._receive(into, p, tag, what) for p, into in receiving.items()]
        messages += [self._send(part, p, tag, what) for p, part in sending.items()]
        if channel is Channel.GRADIENTS:
            with self._lock:  # threads that answer requests count too
                self.sent_bytes += sum(part.nbytes for part in sending.values())
                self.received_bytes += sum(into.nbytes for into in receiving.values())
        return AllToAll(messages)

    def _next_tag(self, channel: Channel) -> int:
        number = self._operations[channel]
        self._operations[channel] += 1
        return _TAGS + (number * len(Channel) + channel) % _TAGS

    def _announce(
        self, sending: dict[int, torch.Tensor], receiving: dict[int, torch.Tensor], what: str
    ) -> list[Message]:
        """Compares this rank's call with those of the ranks it receives from.

        Returns the messages that are still being sent. Raises HeteroError for a difference.
        """
        tag = self._next_tag(Channel.CALLS)

        def title(content: torch.Tensor) -> torch.Tensor:
            return _padded(f"{what} ({content.nbytes} bytes)", _TITLE_BYTES)

        theirs = {peer: _padded("", _TITLE_BYTES) for peer in receiving}
        heard = [self._receive(into, peer, tag, what) for peer, into in theirs.items()]
        sent = [self._send(title(part), peer, tag, what) for peer, part in sending.items()]
        for message, (peer, into) in zip(heard, receiving.items(), strict=True):
            message.wait()
            ours = title(into)
            if not torch.equal(theirs[peer], ours):
                raise HeteroError(
                    f"{self.name(peer)} is at {_text(theirs[peer])} while {self.name(self.rank)} "
                    f"is at {_text(ours)}; all ranks must make the same calls"
                )
        return sent

    def all_gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Every member's `tensor`, in their order, of one shape and dtype. Raises PeerError."""
        found = [tensor if p == self.rank else torch.empty_like(tensor) for p in range(self.size)]
        self.all_to_all([tensor] * self.size, found, what).wait()
        return found

    def all_gather_bytes(self, content: bytes, what: str) -> list[bytes]:
        """Every member's `content`, in their order, of any length. Raises PeerError."""
        lengths = self.all_gather(torch.tensor([len(content)]), what)
        longest = max(1, *(int(length) for length in lengths))
        padded = torch.frombuffer(bytearray(content.ljust(longest, b"\0")), dtype=torch.uint8)
        found = self.all_gather(padded, what)
        return [
            part.numpy().tobytes()[: int(length)]
            for part, length in zip(found, lengths, strict=True)
        ]

    def broadcast(self, tensor: torch.Tensor, root: int, what: str) -> None:
        """Overwrites every member's `tensor` by that of member `root`. Raises PeerError."""
        sends = [tensor if self.rank == root else None] * self.size
        receives = [tensor if peer == root else None for peer in range(self.size)]
        self.all_to_all(sends, receives, what).wait()

    # Requests, which one member makes to another

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
        refusal = _padded("", _REFUSAL_BYTES)
        status = self._receive(refusal, peer, tag, what)
        content = self._receive(into, peer, tag + 1, what)
        return Reply(self._ask(peer, header), status, refusal, content)

    def next_request(self, peer: int, header: torch.Tensor) -> None:
        """Waits without a limit for a request of `peer`. Raises RuntimeError if `peer` is gone."""
        self._requests.recv([_bytes(header)], peer, 0).wait(_FOREVER)

    def say(self, peer: int, header: torch.Tensor) -> None:
        """Sends `peer` a request that needs no answer. Raises PeerError."""
        self._unanswered.append(self._ask(peer, header))

    def _ask(self, peer: int, header: torch.Tensor) -> Message:
        return self._start(self._requests.send, header, peer, 0, "a request")

    def reply(self, peer: int, header: torch.Tensor, content: torch.Tensor, what: str) -> None:
        """Answers the request `header`; returns when `content` has been sent. Raises PeerError."""
        with self._lock:
            self.sent_bytes += content.nbytes
        tag = int(header[-1])
        status = self._send(_padded("", _REFUSAL_BYTES), peer, tag, what)
        self._send(content, peer, tag + 1, what).wait()
        status.wait()

    def refuse(self, peer: int, header: torch.Tensor, why: str) -> None:
        """Answers the request `header` with an error. Raises PeerError."""
        self._send(_padded(why, _REFUSAL_BYTES), peer, int(header[-1]), "an answer").wait()

    def _send(self, tensor: torch.Tensor, peer: int, tag: int, what: str) -> Message:
        return self._start(self._group.send, tensor, peer, tag, what)

    def _receive(self, tensor: torch.Tensor, peer: int, tag: int, what: str) -> Message:
        return self._start(self._group.recv, tensor, peer, tag, what)

    def _start(
        self, start: Callable[..., Any], tensor: torch.Tensor, peer: int, tag: int, what: str
    ) -> Message:
        try:
            work = start([_bytes(tensor)], peer, tag)
        except RuntimeError as error:
            raise self.failure(peer, what, str(error)) from error
        return Message(self, work, tensor, peer, what)

    def close(self) -> None:
        """Drops the connections."""
        self._unanswered.clear()
        self._group = self._requests = None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, because gloo does not know every dtype."""
    return tensor.detach().view(-1).view(torch.uint8)


def _padded(text: str, nbytes: int) -> torch.Tensor:
    """`text` as so many bytes, cut or followed by zeros."""
    content = text.encode()[:nbytes].ljust(nbytes, b"\0")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _text(padded: torch.Tensor) -> str:
    return padded.numpy().tobytes().rstrip(b"\0").decode(errors="replace")
