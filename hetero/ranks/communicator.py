"""Common operations: what all ranks of a group do together, in one order.

They are torch.distributed's collectives, so what Python does for one does not depend on the number
of ranks. A wait for one is limited, ends when a rank has said that it will not come, and names a
rank that did not take part.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist

from hetero.ranks.messages import Requests
from hetero.ranks.peers import Channel, Operation
from offload.errors import HeteroError, PeerError
from offload.interrupts import deliver_signals

_TITLE_BYTES = 160  # of the text that says what a call is
_TELL_S = 1.0  # after which a rank tells the others in what it waits for them
_END_S = 5.0  # for an operation whose connections are broken off to end
# gloo's all-gather takes more than twice as long as its all-to-all of as many bytes
# (docs/benchmarks.md), so this rank's part is sent by all-to-alls, in pieces of so many bytes.
_PIECE_BYTES = 4 << 20
_FEW_RANKS = 4


@dataclass(eq=False)
class Collective:
    """A common operation that is under way; it keeps its tensors alive until wait()."""

    peers: Communicator
    operation: Operation
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


class GatheredParts:
    """Memory for the parts of all members, in their order, which may be taken away meanwhile."""

    def __init__(self, whole: torch.Tensor | None, size: int) -> None:
        """`whole`, flat, is for the parts of `size` members; None: what comes is not kept."""
        self.lock = threading.Lock()  # guards `rows`, and what is in it
        self.rows = None if whole is None else _bytes(whole).view(size, -1)

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


class Communicator(Requests):
    """Connects this rank with the other members of one group of ranks.

    Common operations must be called by all members, those of a channel in the same order.
    """

    def __init__(self, *connection: Any) -> None:
        """Connects the members, as Peers does with these arguments."""
        self._pieces: dict[Channel, list[torch.Tensor]] = {}
        super().__init__(*connection)

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
        operation = Operation(channel, self._begun[channel])
        try:
            work = start(group)
        except RuntimeError as error:
            raise self.failure_of_all(operation, what, str(error)) from error
        self._begun[channel] += 1
        return Collective(self, operation, what, work, tensors)

    def finish(self, work: Any, operation: Operation, what: str) -> None:
        """For Collective: returns when the work is done. Raises PeerError."""
        started = time.monotonic()
        has_told = False
        try:
            while not self._is_done_soon(work, operation, what):
                deliver_signals()
                self.look(operation, what)
                waited_s = time.monotonic() - started
                # (Of all-gathers those who need one limit their waits.)
                if waited_s > self.timeout_s and operation.channel is not Channel.GATHERS:
                    raise self.failure_of_all(operation, what, "timed out", waited_s)
                if waited_s > _TELL_S and not has_told:
                    self.tell_wait(operation, what)
                    has_told = True
        except PeerError:
            self._abandon(work)
            raise
        except BaseException as error:  # a signal's: the memory may have another use afterwards
            self._end_by(error)
            self._abandon(work)
            raise
        finally:
            if has_told:
                self.end_wait()

    def _is_done_soon(self, work: Any, operation: Operation, what: str) -> bool:
        """Waits for a moment. Raises PeerError if the work has failed."""
        if self._is_broken_off:
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
            raise self.failure_of_all(operation, what, str(error)) from error
        return True

    def _abandon(self, work: Any) -> None:
        """Until work that cannot be done any more has let go of its memory."""
        self.break_off()
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
        if self._are_same(torch.tensor([key]), what):
            return
        mine = _padded(title, _TITLE_BYTES)
        titles = mine.new_empty(self.size, _TITLE_BYTES)
        self._all_gather(titles, mine, what)
        for peer in self.others:
            if not torch.equal(titles[peer], mine):
                raise HeteroError(
                    f"{self.name(peer)} is at {_text(titles[peer])} while {self.name(self.rank)} "
                    f"is at {_text(mine)}; all ranks must make the same calls"
                )

    def are_same(self, numbers: torch.Tensor, what: str) -> bool:
        """Whether all members have the same `numbers`, int64 and flat. Raises PeerError."""
        self.announce(what, numbers.nbytes)
        return self._are_same(numbers, what)

    def _are_same(self, numbers: torch.Tensor, what: str) -> bool:
        # The largest number and the largest complement, which is that of the smallest number.
        both = torch.cat([numbers, ~numbers])
        self._reduce_max(both, what, Channel.CALLS).wait()
        largest, smallest = both.chunk(2)
        return torch.equal(largest, ~smallest)

    def any(self, flags: torch.Tensor, what: str) -> torch.Tensor:
        """By element whether some member's flag (uint8, flat) is not zero. Raises PeerError."""
        self.announce(what, flags.nbytes)
        self._reduce_max(flags, what, Channel.CALLS).wait()
        return flags.bool()

    def begin_any(self, flag: torch.Tensor, what: str, channel: Channel) -> Collective:
        """Starts making `flag`, uint8, the largest of all members'. Raises PeerError."""
        return self._reduce_max(flag, what, channel)

    def _reduce_max(self, numbers: torch.Tensor, what: str, channel: Channel) -> Collective:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        return self.begin(channel, what, lambda g: g.allreduce([numbers], options), numbers)

    def all_gather(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """Every member's `tensor`, stacked in their order, in RAM. All have its shape and dtype.

        Raises PeerError, and HeteroError if another member makes a different call (as all calls).
        """
        self.announce(what, tensor.nbytes)
        found = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype)
        self._all_gather(found, tensor.cpu(), what)
        return found

    def _all_gather(self, whole: torch.Tensor, part: torch.Tensor, what: str) -> None:
        into, own = _bytes(whole), _bytes(part.contiguous())
        if into.numel():
            gather: Callable[[Any], Any] = lambda g: g._allgather_base(into, own)  # noqa: E731
            self.begin(Channel.CALLS, what, gather, into, own).wait()

    def all_gather_bytes(self, content: bytes, what: str) -> list[bytes]:
        """Every member's `content`, in their order, of any length. Raises PeerError."""
        lengths = self.all_gather(torch.tensor([len(content)]), what).view(-1).tolist()
        longest = max(1, *lengths)
        padded = torch.frombuffer(bytearray(content.ljust(longest, b"\0")), dtype=torch.uint8)
        found = self.all_gather(padded, what)
        return [
            part.numpy().tobytes()[:length] for part, length in zip(found, lengths, strict=True)
        ]

    def broadcast(self, tensor: torch.Tensor, root: int, what: str) -> None:
        """Overwrites every member's `tensor` by that of member `root`. Raises PeerError."""
        self.announce(what, tensor.nbytes)
        content = _bytes(tensor).cpu()
        if not content.numel():
            return
        options = dist.BroadcastOptions()
        options.rootRank = root
        self.begin(Channel.CALLS, what, lambda g: g.broadcast([content], options), content).wait()
        if tensor.device.type != "cpu":
            _bytes(tensor).copy_(content)

    def exchange(
        self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor], what: str
    ) -> None:
        """Sends each member a tensor of its own, and receives one from each.

        Args:
            sends: by member, what it gets; of any length, also none.
            receives: by member, where its tensor goes, flat. Also this rank's own.
            what: names the call in errors.

        Raises PeerError, and HeteroError if a member sends another length than is received.
        """
        self.announce(what, 0)
        outgoing = torch.cat([_bytes(part.contiguous()).cpu() for part in sends])
        lengths = torch.tensor([part.nbytes for part in sends])
        coming = torch.empty_like(lengths)
        self._all_to_all(coming, lengths, what)
        expected = [part.nbytes for part in receives]
        if coming.tolist() != expected:
            peer = next(p for p in range(self.size) if int(coming[p]) != expected[p])
            raise HeteroError(
                f"{self.name(peer)} sends {int(coming[peer])} bytes in {what}, and "
                f"{self.name(self.rank)} expects {expected[peer]}; all ranks must make the same "
                f"calls"
            )
        incoming = outgoing.new_empty(sum(expected))
        self._all_to_all(incoming, outgoing, what, expected, lengths.tolist())
        for part, into in zip(incoming.split(expected), receives, strict=True):
            if into.numel():
                _bytes(into).copy_(part)

    def _all_to_all(
        self,
        into: torch.Tensor,
        parts: torch.Tensor,
        what: str,
        into_lengths: Sequence[int] = (),
        lengths: Sequence[int] = (),
    ) -> None:
        def start(group: Any) -> Any:
            return group.alltoall_base(into, parts, list(into_lengths), list(lengths))

        self.begin(Channel.CALLS, what, start, into, parts).wait()

    # Chunks and their gradients, whose sizes are the same on all ranks

    def begin_all_to_all(
        self, into: torch.Tensor, parts: torch.Tensor, what: str, channel: Channel
    ) -> Collective:
        """Starts sending each member its part of `parts`, and receiving this rank's parts.

        Both are flat and divided into as many equal parts as there are members, in their order;
        `into` gets this rank's own part, too. Raises PeerError.
        """
        self._count(parts.nbytes)
        return self.begin(
            channel,
            what,
            lambda g: g.alltoall_base(_bytes(into), _bytes(parts), [], []),
            into,
            parts,
        )

    def begin_reduce_scatter(
        self, into: torch.Tensor, parts: torch.Tensor, what: str, channel: Channel
    ) -> Collective:
        """Starts summing all members' `parts` as the backend does, of which this rank gets its own.

        `parts` is flat and divided into as many equal parts as there are members; `into` is of the
        length of one. Raises PeerError.
        """
        self._count(parts.nbytes)
        start: Callable[[Any], Any] = lambda g: g._reduce_scatter_base(into, parts)  # noqa: E731
        return self.begin(channel, what, start, into, parts)

    def gather_parts(
        self, part: torch.Tensor, parts: GatheredParts, what: str, channel: Channel
    ) -> None:
        """Puts every member's `part`, flat, into `parts`, in pieces. Raises PeerError.

        Few members send each other theirs without a copy, one member after the other; many at once,
        so that the number of calls does not depend on theirs.
        """
        if self.size <= _FEW_RANKS and part.device.type == "cpu":
            self._gather_from_few(_bytes(part), parts, what, channel)
            return
        self._count(part.nbytes * self.size)
        own = _bytes(part)  # on a device perhaps, from which its pieces are copied
        length = min(len(own), max(1, _PIECE_BYTES // self.size))
        count = 2 if length < len(own) else 1  # one is on its way while another is stored
        buffers = self._piece_buffers(channel, count, self.size * length)
        under_way: list[tuple[Collective, int, torch.Tensor]] = []

        def store_first() -> None:
            collective, begin, received = under_way.pop(0)
            collective.wait()
            parts.store(begin, received)

        for number, mine in enumerate(own.split(length)):
            if len(under_way) == count:
                store_first()
            buffer = buffers[number % count][:, : self.size * len(mine)]
            sent, received = buffer[0].view(self.size, -1), buffer[1].view(self.size, -1)
            sent.copy_(mine.expand_as(sent))
            begun = self._begin_pieces(received, sent, what, channel)
            under_way.append((begun, number * length, received))
        while under_way:
            store_first()

    def _gather_from_few(
        self, own: torch.Tensor, parts: GatheredParts, what: str, channel: Channel
    ) -> None:
        self._count(own.nbytes * self.size)
        with parts.lock:
            if parts.rows is not None and parts.rows[self.rank].data_ptr() != own.data_ptr():
                parts.rows[self.rank].copy_(own)
        spare = self._piece_buffers(channel, 1, min(len(own), _PIECE_BYTES))[0][0]
        for distance in range(1, self.size):
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            for number, piece in enumerate(own.split(_PIECE_BYTES)):
                sends, receives = [0] * self.size, [0] * self.size
                sends[to] = receives[source] = len(piece)
                begin = number * _PIECE_BYTES
                with parts.lock:  # until the piece is there: all ranks are here, so that is soon
                    into = spare[: len(piece)]
                    if parts.rows is not None:
                        into = parts.rows[source, begin : begin + len(piece)]
                    self._begin_pieces(into, piece, what, channel, receives, sends).wait()

    def _piece_buffers(self, channel: Channel, count: int, length: int) -> list[torch.Tensor]:
        """So many buffers for the bytes of a piece, as it is sent and as it is received.

        They are kept for the channel's next gather.
        """
        kept = self._pieces.setdefault(channel, [])
        if len(kept) < count or kept[0].shape[1] < length:
            kept[:] = [torch.empty(2, length, dtype=torch.uint8) for _ in range(count)]
        return kept[:count]

    def _begin_pieces(
        self,
        into: torch.Tensor,
        parts: torch.Tensor,
        what: str,
        channel: Channel,
        into_lengths: Sequence[int] = (),
        lengths: Sequence[int] = (),
    ) -> Collective:
        def start(group: Any) -> Any:
            return group.alltoall_base(into, parts, list(into_lengths), list(lengths))

        return self.begin(channel, what, start, into, parts)

    def note_exchanged(self, whole_bytes: int) -> None:
        """Devices exchange so many bytes, of all members together, by themselves."""
        self._count(whole_bytes)

    def _count(self, whole_bytes: int) -> None:
        """Counts what a rank sends, and receives, of as many bytes of all ranks together."""
        nbytes = whole_bytes * (self.size - 1) // self.size
        with self._lock:
            self.sent_bytes += nbytes
            self.received_bytes += nbytes


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, because gloo does not know every dtype."""
    return tensor.detach().view(-1).view(torch.uint8)


def _padded(text: str, nbytes: int) -> torch.Tensor:
    """`text` as so many bytes, cut or followed by zeros."""
    content = text.encode()[:nbytes].ljust(nbytes, b"\0")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _text(padded: torch.Tensor) -> str:
    return padded.numpy().tobytes().rstrip(b"\0").decode(errors="replace")
