"""Messages between the ranks of a process group, each wait of which can fail.

Everything that ranks do together is made of point-to-point messages, so that a failure names the
rank that did not come, and so that bytes are counted where they are sent. torch.distributed carries
them; on its own groups, which no other code uses.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from offload.errors import HeteroError, PeerError

_FOREVER = timedelta(days=365)
_TAGS = 1 << 28  # tags of requested and of common messages are kept apart by this
_REFUSAL_BYTES = 512
_TITLE_BYTES = 160  # of what a common operation is
_groups_made: dict[tuple[int, ...], int] = {}  # by their ranks, which all count alike


class Channel(enum.IntEnum):
    """Common operations whose order is the same on all ranks; those of different lanes may mix."""

    CALLS = 0  # of the program: each says what it is, so that different calls are told
    GRADIENTS = 1  # of chunks, in the order of the round
    ROUNDS = 2  # the beginning of a round


class FailedRanks:
    """Which ranks are known to have failed, in the order of learning it; shared by an engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: list[tuple[int, str]] = []

    def note(self, rank: int, why: str) -> None:
        """Rank `rank` (of the world) failed."""
        with self._lock:
            if all(known != rank for known, _ in self._found):
                self._found.append((rank, why))

    @property
    def first(self) -> tuple[int, str] | None:
        """The first that was learned of."""
        return self._found[0] if self._found else None


class Message:
    """One message on its way, sent or expected; keeps its tensor until then."""

    def __init__(
        self, peers: Communicator, work: Any, tensor: torch.Tensor, peer: int, what: str
    ) -> None:
        self._peers = peers
        self._work = work
        self._tensor: torch.Tensor | None = tensor
        self._peer = peer
        self._what = what

    def wait(self) -> None:
        """Until the bytes have been taken over. Raises PeerError, naming the rank; idempotent."""
        if self._tensor is not None:
            self._peers.wait(self._work, self._peer, self._what)
            self._tensor = None


class Reply:
    """What was asked for: first whether it comes, then it."""

    def __init__(
        self,
        request: Message,
        status: Message,
        refusal: torch.Tensor,
        content: Message,
        whom: str,
    ) -> None:
        self._request: Message | None = request  # must be there until it is taken over
        self._status = status
        self._refusal = refusal
        self._content = content
        self._whom = whom

    def wait(self) -> None:
        """Until it is here. Raises PeerError if it does not come; idempotent."""
        self._status.wait()
        self._request = None  # what is answered was taken over
        refusal = self._refusal.numpy().tobytes().rstrip(b"\0")
        if refusal:
            raise PeerError(f"{self._whom} refused: {refusal.decode(errors='replace')}")
        self._content.wait()


class AllToAll:
    """Messages of one common operation. wait() returns when all have arrived."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages

    def wait(self) -> None:
        """Raises PeerError for the first rank that failed."""
        for message in self._messages:
            message.wait()


class Communicator:
    """The ranks of one group, from this one's point of view.

    `rank` and `size` count within the group; `name()` says a member's rank in the world, as users
    know it. Common operations must be called by all members in the same order.
    """

    def __init__(self, ranks: Sequence[int], timeout_s: float, failures: FailedRanks) -> None:
        """`ranks` are the members' ranks in the world. All members must call this."""
        self.ranks = tuple(ranks)
        self.size = len(ranks)
        self.rank = self.ranks.index(self._world_rank())
        self.others = [peer for peer in range(self.size) if peer != self.rank]
        self.failures = failures
        self.timeout_s = timeout_s
        self.sent_bytes = 0  # of chunks; what is needed to agree on them is not counted
        self.received_bytes = 0
        self._operations = dict.fromkeys(Channel, 0)
        self._replies = 0
        self._lock = threading.Lock()
        self._farewells: list[Message] = []  # to be there until they are taken over

        self._group, self._requests = self._connect()

    def _world_rank(self) -> int:
        return dist.get_rank()

    def _connect(self) -> tuple[Any, Any]:
        """The groups that carry data and requests."""
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
        """Until all members are here; the groups would not say who is not."""
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
        """A member as users know it."""
        return f"rank {self.ranks[peer]}"

    def wait(self, work: Any, peer: int, what: str) -> None:
        """Waits for one transfer with `peer`. Raises PeerError."""
        started = time.perf_counter()
        try:
            work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            waited_s = time.perf_counter() - started
            raise self.failure(peer, what, str(error), waited_s) from error

    def failure(self, peer: int, what: str, why: str, waited_s: float = 0.0) -> PeerError:
        """The error for a transfer with `peer` that failed, with the cause if it is known."""
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

    # What all do together

    def all_to_all(
        self,
        sends: Sequence[torch.Tensor | None],
        receives: Sequence[torch.Tensor | None],
        what: str,
        channel: Channel = Channel.CALLS,
    ) -> AllToAll:
        """Starts sending sends[p] to, and receiving receives[p] from, every other member p.

        The bytes of gradients are counted. Raises HeteroError if another rank does something else.
        """
        tag = self._next_tag(channel)
        messages = []
        if channel is Channel.CALLS:
            # gloo ends the process that gets more bytes than it expects.
            messages += self._announce(sends, receives, what)
        sent_bytes = received_bytes = 0
        for peer in self.others:
            into = receives[peer]
            if into is not None:
                messages.append(self._receive(into, peer, tag, what))
                received_bytes += into.nbytes
        for peer in self.others:
            part = sends[peer]
            if part is not None:
                messages.append(self._send(part, peer, tag, what))
                sent_bytes += part.nbytes
        if channel is Channel.GRADIENTS:
            with self._lock:  # threads that answer count, too
                self.sent_bytes += sent_bytes
                self.received_bytes += received_bytes
        return AllToAll(messages)

    def _next_tag(self, channel: Channel) -> int:
        number = self._operations[channel]
        self._operations[channel] += 1
        return _TAGS + (number * len(Channel) + channel) % _TAGS

    def _announce(
        self,
        sends: Sequence[torch.Tensor | None],
        receives: Sequence[torch.Tensor | None],
        what: str,
    ) -> list[Message]:
        """Compares what this rank and those it hears from are about to do; what is still sent."""
        tag = self._next_tag(Channel.CALLS)

        def title(content: torch.Tensor) -> torch.Tensor:
            text = f"{what} ({content.nbytes} bytes)".encode()
            return torch.frombuffer(
                bytearray(text[:_TITLE_BYTES].ljust(_TITLE_BYTES, b"\0")), dtype=torch.uint8
            )

        heard = []
        for peer in self.others:
            into = receives[peer]
            if into is not None:
                theirs = torch.empty(_TITLE_BYTES, dtype=torch.uint8)
                heard.append((peer, title(into), theirs, self._receive(theirs, peer, tag, what)))
        sent = [
            self._send(title(part), peer, tag, what)
            for peer in self.others
            if (part := sends[peer]) is not None
        ]
        for peer, expected, theirs, message in heard:
            message.wait()
            if not torch.equal(theirs, expected):
                ours, other = (
                    t.numpy().tobytes().rstrip(b"\0").decode(errors="replace")
                    for t in (expected, theirs)
                )
                raise HeteroError(
                    f"{self.name(peer)} is at {other} while {self.name(self.rank)} is at {ours}; "
                    f"all ranks must make the same calls"
                )
        return sent

    def all_gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Every member's `tensor` (of the same shape and dtype everywhere), in their order."""
        found = [tensor if p == self.rank else torch.empty_like(tensor) for p in range(self.size)]
        self.all_to_all([tensor] * self.size, found, what).wait()
        return found

    def all_gather_bytes(self, content: bytes, what: str) -> list[bytes]:
        """Every member's `content`, of any length."""
        lengths = self.all_gather(torch.tensor([len(content)]), what)
        longest = max(1, *(int(length) for length in lengths))
        padded = torch.frombuffer(bytearray(content.ljust(longest, b"\0")), dtype=torch.uint8)
        found = self.all_gather(padded, what)
        return [
            part.numpy().tobytes()[: int(length)]
            for part, length in zip(found, lengths, strict=True)
        ]

    def broadcast(self, tensor: torch.Tensor, root: int, what: str) -> None:
        """Everybody's `tensor` becomes that of member `root`."""
        if self.rank == root:
            sends: list[torch.Tensor | None] = [tensor] * self.size
            self.all_to_all(sends, [None] * self.size, what).wait()
        else:
            receives = [tensor if p == root else None for p in range(self.size)]
            self.all_to_all([None] * self.size, receives, what).wait()

    # What one asks of another

    def request(self, peer: int, header: torch.Tensor, into: torch.Tensor, what: str) -> Reply:
        """Asks `peer` to reply() to `header` (int64, whose last element this sets) with `into`."""
        with self._lock:
            tag = 2 * self._replies % _TAGS
            self._replies += 1
            self.received_bytes += into.nbytes
        header[-1] = tag
        refusal = torch.empty(_REFUSAL_BYTES, dtype=torch.uint8)
        status = self._receive(refusal, peer, tag, what)
        content = self._receive(into, peer, tag + 1, what)
        return Reply(self._ask(peer, header), status, refusal, content, self.name(peer))

    def next_request(self, peer: int, header: torch.Tensor) -> None:
        """Waits, as long as it takes, for a request of `peer`. Raises RuntimeError at its end."""
        self._requests.recv([header], peer, 0).wait(_FOREVER)

    def say(self, peer: int, header: torch.Tensor) -> None:
        """Sends `header`, which is not answered, to where `peer` waits for requests."""
        self._farewells.append(self._ask(peer, header))

    def _ask(self, peer: int, header: torch.Tensor) -> Message:
        try:
            work = self._requests.send([header], peer, 0)
        except RuntimeError as error:
            raise self.failure(peer, "a request", str(error)) from error
        return Message(self, work, header, peer, "a request")

    def reply(self, peer: int, header: torch.Tensor, content: torch.Tensor, what: str) -> None:
        """Answers a request; returns when `content` has been taken over."""
        with self._lock:
            self.sent_bytes += content.nbytes
        tag = int(header[-1])
        status = self._send(torch.zeros(_REFUSAL_BYTES, dtype=torch.uint8), peer, tag, what)
        self._send(content, peer, tag + 1, what).wait()
        status.wait()

    def refuse(self, peer: int, header: torch.Tensor, why: str) -> None:
        """Answers a request with an error."""
        text = why.encode()[: _REFUSAL_BYTES - 1].ljust(_REFUSAL_BYTES, b"\0")
        refusal = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._send(refusal, peer, int(header[-1]), "an answer").wait()

    def _send(self, tensor: torch.Tensor, peer: int, tag: int, what: str) -> Message:
        try:
            work = self._group.send([_bytes(tensor)], peer, tag)
        except RuntimeError as error:
            raise self.failure(peer, what, str(error)) from error
        return Message(self, work, tensor, peer, what)

    def _receive(self, tensor: torch.Tensor, peer: int, tag: int, what: str) -> Message:
        try:
            work = self._group.recv([_bytes(tensor)], peer, tag)
        except RuntimeError as error:
            raise self.failure(peer, what, str(error)) from error
        return Message(self, work, tensor, peer, what)

    def close(self) -> None:
        """Leaves the group."""
        self._farewells.clear()
        self._group = self._requests = None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes: not every backend knows every dtype."""
    return tensor.detach().view(-1).view(torch.uint8)
