"""Messages between the ranks of a process group; every wait for one may fail, naming a rank.

All that ranks do together is made of point-to-point messages, so that an error names the rank that
did not take part, and bytes are counted where they are sent. gloo carries them, over connections
that no other code uses.
"""

from __future__ import annotations

import contextlib
import enum
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial, partialmethod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hetero.ranks.failed_ranks import FailedRanks, name_error
from hetero.ranks.waiting import wait_interruptibly
from offload.errors import HeteroError, PeerError

_FOREVER = timedelta(days=365)
_AT_ONCE = timedelta(milliseconds=1)
_TAGS = 1 << 28  # tags of requested and of common messages are kept apart by this
_REFUSAL_BYTES = 512
_TITLE_BYTES = 160  # of the text that says what a common operation is
_NEVER_SENT = 2 * _TAGS + 1  # a tag without messages


class Channel(enum.IntEnum):
    """An independent sequence of common operations.

    Within a channel all ranks make the same operations in the same order. The order between
    operations of different channels may differ between ranks.
    """

    CALLS = 0  # calls of the program; each is headed by what it is, so that a mismatch is an error
    GRADIENTS = 1  # gradients of chunks, in a round's order of sending
    ROUNDS = 2  # the beginning of a round


class Operation(NamedTuple):
    """A common operation: its channel, and how many that channel had before it."""

    channel: Channel
    number: int

    @property
    def tag(self) -> int:
        """What its messages are known by."""
        return _TAGS + (self.number * len(Channel) + self.channel) % _TAGS


@dataclass(frozen=True)
class End:
    """What a rank told when it ended or left.

    Attributes:
        attempt: FailedRanks.attempt at that time.
        made: how many operations it had made, by channel; it makes no others.
        why: a sentence.
    """

    attempt: int
    made: Sequence[int]
    why: str


@dataclass(eq=False)
class Message:
    """A message that is being sent or received; it keeps its tensor alive until wait()."""

    peers: Communicator
    work: Any  # gloo's
    tensor: torch.Tensor | None
    peer: int
    what: str
    operation: Operation | None = None  # the common one that it is part of

    def wait(self) -> None:
        """Returns when the bytes have been sent or received. Raises PeerError; idempotent."""
        if self.tensor is not None:
            self.peers.wait(self._wait, self.peer, self.what, self.operation)

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

    def __init__(
        self,
        ranks: Sequence[int],
        timeout_s: float,
        failures: FailedRanks,
        store: Any,
        look: Callable[[], None],
    ) -> None:
        """Connects the members. All of them must call this, after they have met.

        Args:
            ranks: the members' ranks in the world; this process is one of them.
            timeout_s: limit of each wait for another member.
            failures: where failed ranks are noted.
            store: torch.distributed's, with a prefix that nothing else has had.
            look: raises PeerError if a member has failed or is gone, and so will never be
                connected.

        Raises PeerError if a member is not there any more.
        """
        self.ranks = tuple(ranks)
        self.size = len(ranks)
        self.rank = self.ranks.index(self._world_rank())
        self.others = [peer for peer in range(self.size) if peer != self.rank]
        self.failures = failures
        self.timeout_s = timeout_s
        self.sent_bytes = 0  # of gradients, and of answers to requests
        self.received_bytes = 0
        self._store = store
        self._is_broken_off = False
        self._operations = dict.fromkeys(Channel, 0)  # begun
        self._made = dict.fromkeys(Channel, 0)  # of which all messages are on their way
        self._replies = 0
        self._lock = threading.Lock()
        self._unanswered: list[Message] = []  # keep their tensors until close()

        self._group, self._requests = self._connect(look)
        failures.add(self)

    def _world_rank(self) -> int:
        return dist.get_rank()

    def _connect(self, look: Callable[[], None]) -> tuple[Any, Any]:
        """Makes the connections for data and for requests."""
        from hetero.ranks.polled_store import PolledStore  # torch may be built without any store

        made: list[Any] = []
        # Kept, because gloo may ask it later.
        waiting = self._polled_store = PolledStore(self._store, self.timeout_s, look)

        def connect() -> None:
            # Made directly: groups by dist.new_group() have names that are used again after they
            # were destroyed, with the addresses of the old ones still in the store.
            for purpose in ("data", "requests"):
                store = dist.distributed_c10d.PrefixStore(purpose, waiting)
                timeout = timedelta(seconds=self.timeout_s)
                made.append(dist.ProcessGroupGloo(store, self.rank, self.size, timeout))

        def end(error: BaseException) -> None:
            waiting.end()
            self._end_by(error)

        started = time.perf_counter()
        try:
            wait_interruptibly(connect, look, end)
        except RuntimeError as error:
            with contextlib.suppress(RuntimeError):  # the process that keeps the store is gone
                look()  # it knows which rank is gone
            waited_s = time.perf_counter() - started
            # gloo calls it a timeout, too, when nothing listens any more.
            why = "broken off" if waited_s < self.timeout_s / 2 else str(error)
            raise self.failure(self.others[0], "hetero's start", why, waited_s) from error
        waiting.connected()
        data, requests = made
        return data, requests

    def name(self, peer: int) -> str:
        """A member's name as users know it: "rank 3" of the world."""
        return f"rank {self.ranks[peer]}"

    def wait(
        self,
        wait: Callable[[timedelta], object],
        peer: int,
        what: str,
        operation: Operation | None = None,
    ) -> None:
        """Calls `wait` for one transfer with `peer`, which `what` names in the error.

        It gets the time limit, and raises RuntimeError if the transfer fails. `operation` is the
        common one that it is part of, if any. Raises PeerError. If a signal handler raises
        meanwhile, as Ctrl-C's does, this rank ends for the others.
        """
        started = time.perf_counter()

        def look() -> None:
            end = None if operation is None else self._end_of(peer)
            if operation and end and end.made[operation.channel] <= operation.number:
                raise self.failure(peer, what, end.why)

        try:
            if self._is_broken_off:
                raise RuntimeError("the connections are broken off")
            limit = timedelta(seconds=self.timeout_s)
            wait_interruptibly(partial(wait, limit), look, self._end_by)
        except RuntimeError as error:
            waited_s = time.perf_counter() - started
            raise self.failure(peer, what, str(error), waited_s) from error

    def failure(self, peer: int, what: str, why: str, waited_s: float = 0.0) -> PeerError:
        """The error for a failed transfer with `peer`; it names the first failure too, if known."""
        if self.failures.own_end is not None:
            return PeerError(f"{self.failures.own_end}; {what} needs other ranks")
        end = self._end_of(peer)
        if end is not None:
            fact = f"{end.why} ({self.name(self.rank)} needed it for {what})"
        elif "imed out" in why or "timeout" in why:
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

    # The end

    def tell_end(self, why: str) -> None:
        """Tells the other members that this one makes no more common operations, and why.

        A wait for one that it has not made ends then. What it has made, and answers to requests,
        arrive as before.
        """
        end = End(self.failures.attempt, [self._made[channel] for channel in Channel], why)
        with contextlib.suppress(RuntimeError):  # the process that keeps the store is gone
            self._store.set(f"end/{self.rank}", json.dumps(asdict(end)))

    def _end_of(self, peer: int) -> End | None:
        """What `peer` told, if it has ended."""
        key = f"end/{peer}"
        with contextlib.suppress(RuntimeError):  # the process that keeps the store is gone
            if self._store.check([key]):
                end = End(**json.loads(self._store.get(key)))
                return end if end.attempt == self.failures.attempt else None
        return None

    def _end_by(self, error: BaseException) -> None:
        self.failures.end(f"{self.name(self.rank)} ended by {name_error(error)}")

    def break_off(self) -> None:
        """Ends all transfers and waits, here and on the other members; idempotent."""
        for group in (self._group, self._requests):
            if group is not None:
                # gloo closes all connections of a group of which one transfer has timed out; it
                # has no other way to end what waits for them.
                with contextlib.suppress(RuntimeError):
                    nothing = torch.empty(1, dtype=torch.uint8)
                    group.recv([nothing], self.others[0], _NEVER_SENT).wait(_AT_ONCE)
        self._is_broken_off = True

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
        receiving = {p: into for p in self.others if (into := receives[p]) is not None}
        sending = {p: part for p in self.others if (part := sends[p]) is not None}
        messages = []
        if channel is Channel.CALLS:
            # gloo ends the process that gets more bytes than it expects.
            messages += self._announce(sending, receiving, what)
        operation = self._next_operation(channel)
        for peer, into in receiving.items():
            messages.append(self._receive(into, peer, operation.tag, what, operation))
        for peer, part in sending.items():
            messages.append(self._send(part, peer, operation.tag, what, operation))
        self._made[channel] = operation.number + 1
        if channel is Channel.GRADIENTS:
            with self._lock:  # threads that answer requests count too
                self.sent_bytes += sum(part.nbytes for part in sending.values())
                self.received_bytes += sum(into.nbytes for into in receiving.values())
        return AllToAll(messages)

    def _next_operation(self, channel: Channel) -> Operation:
        number = self._operations[channel]
        self._operations[channel] += 1
        return Operation(channel, number)

    def _announce(
        self, sending: dict[int, torch.Tensor], receiving: dict[int, torch.Tensor], what: str
    ) -> list[Message]:
        """Compares this rank's call with those of the ranks it receives from.

        Returns the messages that are still being sent. Raises HeteroError for a difference.
        """
        operation = self._next_operation(Channel.CALLS)
        tag = operation.tag

        def title(content: torch.Tensor) -> torch.Tensor:
            return _padded(f"{what} ({content.nbytes} bytes)", _TITLE_BYTES)

        theirs = {peer: _padded("", _TITLE_BYTES) for peer in receiving}
        heard = [self._receive(into, p, tag, what, operation) for p, into in theirs.items()]
        sent = [self._send(title(part), p, tag, what, operation) for p, part in sending.items()]
        self._made[Channel.CALLS] = operation.number + 1
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
        requests = self._requests
        if requests is None:
            raise RuntimeError("the connections are closed")
        requests.recv([_bytes(header)], peer, 0).wait(_FOREVER)

    def say(self, peer: int, header: torch.Tensor) -> None:
        """Sends `peer` a request that needs no answer. Raises PeerError."""
        self._unanswered.append(self._ask(peer, header))

    def _ask(self, peer: int, header: torch.Tensor) -> Message:
        return self._send(header, peer, 0, "a request", is_request=True)

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

    def _start(
        self,
        way: str,
        tensor: torch.Tensor,
        peer: int,
        tag: int,
        what: str,
        operation: Operation | None = None,
        is_request: bool = False,
    ) -> Message:
        group = self._requests if is_request else self._group
        if group is None:
            raise PeerError(f"{what} needs other ranks, and this engine's connections are closed")
        try:
            work = getattr(group, way)([_bytes(tensor)], peer, tag)
        except RuntimeError as error:
            raise self.failure(peer, what, str(error)) from error
        return Message(self, work, tensor, peer, what, operation)

    _send = partialmethod(_start, "send")
    _receive = partialmethod(_start, "recv")

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
