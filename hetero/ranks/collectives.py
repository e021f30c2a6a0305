"""Common operations: what all ranks of a group do together, in one order.

They are torch.distributed's collectives, so what Python does for one does not depend on the number
of ranks. A wait for one is limited, ends when a rank has said that it will not come, and names a
rank that did not take part.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partialmethod
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist

from hetero.ranks.peers import Channel, PeerClosedError, Peers, RankOperation
from hetero.ranks.waiting import name_error
from offload.errors import HeteroError, PeerError
from offload.interrupts import deliver_signals

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

    def follow(self) -> None:
        """What the calling thread computes from now on comes after the gather, which was made."""

    def store(self, begin: int, pieces: torch.Tensor) -> None:
        """Takes bytes of all members' parts, a row each, from byte `begin` of the parts on."""
        with self.lock:
            if self.rows is not None:
                self.rows[:, begin : begin + pieces.shape[1]].copy_(pieces)


_TITLE_BYTES = 512  # of the text that says what a call is
_TELL_S = 1.0  # after which a rank tells the others in what it waits for them
_END_S = 5.0  # for an operation whose connections are broken off to end


@dataclass(eq=False)
class Collective:
    """A common operation that is under way; it keeps its tensors alive until wait()."""

    peers: Collectives
    operation: RankOperation
    what: str
    work: Any  # torch.distributed's
    tensors: Sequence[torch.Tensor]
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def wait(self) -> None:
        """Returns when all ranks have taken part. Raises PeerError; idempotent."""
        with self._lock:
            if self.work is not None:
                try:
                    self.peers.finish(self.work, self.operation, self.what)
                finally:
                    self.work, self.tensors = None, ()


class Collectives(Requests):
    """What the members of a group of ranks do together.

    Common operations must be called by all members, those of a channel in the same order.
    """

    def begin(
        self,
        channel: Channel,
        what: str,
        start: Callable[[Any], Any],
        *tensors: torch.Tensor,
    ) -> Collective:
        """Starts a collective: `start` is called with the channel's process group.

        It returns torch.distributed's work. `what` names the operation in errors. No one of
        `tensors` may be used otherwise until wait(). Raises PeerError.
        """
        group = self.connection(channel, what)
        operation = RankOperation(channel, self._begun[channel])
        try:
            work = start(group)
        except RuntimeError as error:
            raise self.failure_of_all(operation, what, str(error)) from error
        self._begun[channel] += 1
        return Collective(self, operation, what, work, tensors)

    def finish(self, work: Any, operation: RankOperation, what: str) -> None:
        """For Collective: returns when the work is done. Raises PeerError."""
        started = time.monotonic()
        has_told = False
        try:
            while not self._is_done_soon(work, operation, what, started):
                deliver_signals()
                self.look(operation, what)
                waited_s = time.monotonic() - started
                # (Of all-gathers those who need one limit their waits.)
                if waited_s > self.timeout_s and operation.channel is not Channel.GATHERS:
                    raise self.failure_of_all(operation, what, "timed out", waited_s)
                if waited_s > _TELL_S and not has_told:
                    # For the error of the first rank whose patience ends.
                    self.notes.leave("wait", json.dumps([*operation, what]))
                    has_told = True
        except PeerError as error:
            # A channel whose operations alone have ended, because a member has closed its engine or
            # this rank has given them up, is no failure, and requests are answered over the others.
            is_failure = not (
                isinstance(error, PeerClosedError) or operation.channel in self._given_up
            )
            if is_failure:
                # Told first: the others would take this rank for the cause of what breaks now.
                self.failures.tell(f"{self.name(self.rank)} gave up: {name_error(error)}")
            self._abandon(work, None if is_failure else operation.channel)
            raise
        except BaseException as error:  # a signal's: the memory may have another use afterwards
            self._end_by(error)
            self._abandon(work)
            raise
        finally:
            if has_told:
                self.notes.take_back("wait")

    def _is_done_soon(self, work: Any, operation: RankOperation, what: str, started: float) -> bool:
        """Waits for a moment. Raises PeerError if the work, waited for since then, has failed."""
        if None in self._given_up:
            raise self.failure(self.others[0], what, "the connections are broken off")
        try:
            work.wait(timedelta(seconds=self._while_waiting.look_s))
            return True
        except RuntimeError:
            if not work.is_completed():
                return False
        try:  # it has failed, or was done just after its time
            work.wait()
        except RuntimeError as error:
            waited_s = time.monotonic() - started
            raise self.failure_of_all(operation, what, str(error), waited_s) from error
        return True

    def _abandon(self, work: Any, only: Channel | None = None) -> None:
        """Breaks off one channel or all, and waits until the work has let go of its memory."""
        self.break_off(only)
        until = time.monotonic() + _END_S
        while not work.is_completed() and time.monotonic() < until:
            time.sleep(0.001)

    # Calls of the program

    def announce(self, what: str, nbytes: int) -> None:
        """Compares this rank's call, which brings so many bytes, with that of the other members.

        (gloo ends the process that gets more bytes than it expects.) Raises HeteroError, naming a
        rank, if they are not the same.
        """
        title = f"{what} ({nbytes} bytes)"
        key = int.from_bytes(blake2b(title.encode(), digest_size=7).digest(), "little")
        if self._are_same(torch.tensor([key], device="cpu"), what):
            return
        # With the key, because what is cut off may be all that differs.
        mine = padded(f"{key} {title}", _TITLE_BYTES)
        titles = mine.new_empty(self.size, _TITLE_BYTES)
        self._all_gather(titles, mine, what)
        for peer in self.others:
            if not torch.equal(titles[peer], mine):
                theirs, ours = (text_in(each).partition(" ")[2] for each in (titles[peer], mine))
                raise HeteroError(
                    f"{self.name(peer)} is at {theirs} while {self.name(self.rank)} is at {ours}; "
                    f"all ranks must make the same calls"
                )

    def are_same(self, numbers: torch.Tensor, what: str) -> bool:
        """Whether all members have the same `numbers`, int64 and flat. Raises PeerError."""
        self.announce(what, numbers.nbytes)
        return self._are_same(numbers, what)

    def _are_same(self, numbers: torch.Tensor, what: str) -> bool:
        # The largest number and the largest complement, which is that of the smallest number.
        both = torch.cat([numbers, ~numbers])
        self.begin_any(both, what, Channel.CALLS).wait()
        largest, smallest = both.chunk(2)
        return torch.equal(largest, ~smallest)

    def any(self, flags: torch.Tensor, what: str) -> torch.Tensor:
        """By element whether some member's flag (uint8, flat) is not zero. Raises PeerError."""
        self.announce(what, flags.nbytes)
        self.begin_any(flags, what, Channel.CALLS).wait()
        return flags.bool()

    def begin_any(self, numbers: torch.Tensor, what: str, channel: Channel) -> Collective:
        """Starts making each number, or flag, the largest of all members'. Raises PeerError."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        return self.begin(channel, what, lambda g: g.allreduce([numbers], options), numbers)

    def all_gather(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """Every member's `tensor`, stacked in their order, in RAM. All have its shape and dtype.

        Raises PeerError, and HeteroError if another member makes a different call (as all calls).
        """
        self.announce(what, tensor.nbytes)
        found = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device="cpu")
        self._all_gather(found, tensor.cpu(), what)
        return found

    def _all_gather(self, whole: torch.Tensor, part: torch.Tensor, what: str) -> None:
        into, own = as_bytes(whole), as_bytes(part.contiguous())
        if into.numel():
            gather: Callable[[Any], Any] = lambda g: g._allgather_base(into, own)  # noqa: E731
            self.begin(Channel.CALLS, what, gather, into, own).wait()

    def all_gather_bytes(self, content: bytes, what: str) -> list[bytes]:
        """Every member's `content`, in their order, of any length. Raises PeerError."""
        lengths = (
            self.all_gather(torch.tensor([len(content)], device="cpu"), what).view(-1).tolist()
        )
        longest = max(1, *lengths)
        padded = torch.frombuffer(bytearray(content.ljust(longest, b"\0")), dtype=torch.uint8)
        found = self.all_gather(padded, what)
        return [
            part.numpy().tobytes()[:length] for part, length in zip(found, lengths, strict=True)
        ]

    def broadcast(self, tensor: torch.Tensor, root: int, what: str) -> None:
        """Overwrites every member's `tensor` by that of member `root`. Raises PeerError."""
        self.announce(what, tensor.nbytes)
        content = as_bytes(tensor).cpu()
        if not content.numel():
            return
        options = dist.BroadcastOptions()
        options.rootRank = root
        self.begin(Channel.CALLS, what, lambda g: g.broadcast([content], options), content).wait()
        if tensor.device.type != "cpu":
            as_bytes(tensor).copy_(content)

    def exchange(
        self,
        sends: Sequence[Sequence[torch.Tensor]],
        receives: Sequence[Sequence[torch.Tensor]],
        what: str,
    ) -> None:
        """Sends each member tensors of its own, and receives some from each.

        Args:
            sends: by member, what it gets; of any number and length, also none.
            receives: by member, where its tensors go, flat. Also this rank's own.
            what: names the call in errors.

        Raises PeerError, and HeteroError if a member sends another length than is received.
        """
        self.announce(what, 0)
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        parts = [as_bytes(part.contiguous()).cpu() for some in sends for part in some]
        outgoing = torch.cat([nothing, *parts])
        lengths = torch.tensor([sum(part.nbytes for part in some) for some in sends], device="cpu")
        coming = torch.empty_like(lengths)
        self.begin(
            Channel.CALLS, what, lambda g: g.alltoall_base(coming, lengths, [], []), coming, lengths
        ).wait()
        expected = [sum(into.nbytes for into in some) for some in receives]
        if coming.tolist() != expected:
            peer = next(p for p in range(self.size) if int(coming[p]) != expected[p])
            raise HeteroError(
                f"{self.name(peer)} sends {int(coming[peer])} bytes in {what}, and "
                f"{self.name(self.rank)} expects {expected[peer]}; all ranks must make the same "
                f"calls"
            )
        incoming = outgoing.new_empty(sum(expected))
        self.begin(
            Channel.CALLS,
            what,
            lambda g: g.alltoall_base(incoming, outgoing, expected, lengths.tolist()),
            incoming,
            outgoing,
        ).wait()
        wanted = [into for some in receives for into in some]
        sizes = [into.nbytes for into in wanted]
        for part, into in zip(incoming.split(sizes), wanted, strict=True):
            if into.numel():
                as_bytes(into).copy_(part)
