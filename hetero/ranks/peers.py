"""The members of a group of ranks, the connections to them, and how waits for them fail.

gloo carries all that ranks tell each other on the CPU, over connections that no other code uses.
"""

from __future__ import annotations

import contextlib
import enum
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hetero.ranks.waiting import (
    FailedRanks,
    WaitingJob,
    WhileWaiting,
    name_error,
    wait_for_job,
    wait_interruptibly,
)
from offload.errors import PeerError
from offload.interrupts import deliver_signals

AT_ONCE = timedelta(milliseconds=1)
_NOTICE_S = 0.5  # for the shard servers' threads to see that a connection is broken
_NEVER_SENT = (1 << 29) + 1  # a tag without messages


class Channel(enum.IntEnum):
    """An independent sequence of common operations, over connections of its own.

    Within a channel all ranks make the same operations in the same order. The order between
    operations of different channels may differ between ranks.
    """

    CALLS = 0  # calls of the program; each is headed by what it is, so that a mismatch is an error
    GRADIENTS = 1  # gradients of chunks, in a round's order of sending
    ROUNDS = 2  # the beginning of a round
    GATHERS = 3  # all-gathers of chunks, in the order that the ranks have agreed on


class RankOperation(NamedTuple):
    """A common operation: its channel, and how many that channel had before it."""

    channel: Channel
    number: int


@dataclass(frozen=True)
class End:
    """What a rank told when it ended or left.

    Attributes:
        made: how many operations it had made, by channel; it makes no others.
        why: a sentence.
        answers: whether it goes on answering requests until the other ranks have ended, too.
    """

    made: Sequence[int]
    why: str
    answers: bool


class PeerClosedError(PeerError):
    """Another rank takes part in no more all-gathers, and answers requests for what it has."""


class PeerNotes:
    """Texts that the members of a group leave for each other in torch.distributed's store.

    Where the process that keeps the store is gone, none is left, and none is found.
    """

    def __init__(self, store: Any, rank: int) -> None:
        """`rank` is this one's number in the group."""
        self.store = store
        self._rank = rank
        self._polled: list[Any] = []  # because process groups may ask them later

    def leave(self, key: str, text: str) -> None:
        """Leaves a text, which the others find by `key` and this rank."""
        with contextlib.suppress(RuntimeError):
            self.store.set(f"{key}/{self._rank}", text)

    def take_back(self, key: str) -> None:
        """Removes what was left there."""
        with contextlib.suppress(RuntimeError):
            self.store.delete_key(f"{key}/{self._rank}")

    def find(self, key: str, peer: int) -> str | None:
        """The text that `peer` has left there; None if it has not."""
        with contextlib.suppress(RuntimeError):
            if self.store.check([f"{key}/{peer}"]):
                return str(self.store.get(f"{key}/{peer}").decode())
        return None

    def wait_of(self, peer: int) -> tuple[RankOperation, str] | None:
        """The common operation in which `peer` waits, if it has told that, and what it is for."""
        found = self.find("wait", peer)
        if found is None:
            return None
        channel, number, what = json.loads(found)
        return RankOperation(Channel(channel), number), what

    def polled(self, timeout_s: float, look: Callable[[], None]) -> Any:
        """A PolledStore over this one, with these limits of its waits."""
        from hetero.ranks.start.meeting import (
            PolledStore,  # torch may be built without any store
        )

        self._polled.append(PolledStore(self.store, timeout_s, look))
        return self._polled[-1]


class Peers:
    """The members of one group of ranks, seen from this one.

    `rank`, `size` and every `peer` count within the group; `ranks` are the members' ranks in the
    world, as users know them.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        timeout_s: float,
        failures: FailedRanks,
        while_waiting: WhileWaiting,
        store: Any,
        look: Callable[[], None],
    ) -> None:
        """Connects the members. All of them must call this, after they have met.

        Args:
            ranks: the members' ranks in the world; this process is one of them.
            timeout_s: limit of each wait for another member.
            failures: where failed ranks are noted.
            while_waiting: what is done in waits for other members.
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
        self._while_waiting = while_waiting
        self.notes = PeerNotes(store, self.rank)
        # Channels whose connections alone this rank has broken off; None: all connections.
        self._given_up: set[Channel | None] = set()
        self._begun = dict.fromkeys(Channel, 0)  # common operations
        self._groups: Mapping[Channel, Any] = self._connect(Channel, "", look)
        self._return_groups: Mapping[Channel, Any] = {}  # see connect_returns()
        failures.add(self)

    def _world_rank(self) -> int:
        return dist.get_rank()

    def _connect(
        self, channels: Iterable[Channel], suffix: str, look: Callable[[], None]
    ) -> dict[Channel, Any]:
        """Makes the connections of each channel."""
        made: dict[Channel, Any] = {}

        def connect(waiting: Any) -> None:
            # Made directly: groups by dist.new_group() have names that are used again after they
            # were destroyed, with the addresses of the old ones still in the store.
            for channel in channels:
                store = dist.distributed_c10d.PrefixStore(channel.name + suffix, waiting)
                timeout = timedelta(seconds=self.timeout_s)
                made[channel] = dist.ProcessGroupGloo(store, self.rank, self.size, timeout)

        self._connect_by(connect, look)
        return made

    def connect_returns(self, *channels: Channel) -> None:
        """Gives `channels` second connections, for what goes to lower ranks.

        One of gloo's connections carries bytes in one direction at a time, so an exchange over a
        single one has half of a link's rate (docs/benchmarks.md). All members must call it. Raises
        PeerError.
        """
        self._return_groups = self._connect(channels, "-RETURN", self.failures.check)

    def connect_devices(self, channel: Channel, make: Callable[[Any, int, int], Any]) -> Any:
        """The process group of the members' devices, which `make(store, rank, size)` makes.

        It is for what the operations of `channel` prepare. All members must call it, once for each
        channel. Raises PeerError.
        """
        made: list[Any] = []

        def connect(waiting: Any) -> None:
            store = dist.distributed_c10d.PrefixStore(f"{channel.name}-DEVICES", waiting)
            made.append(make(store, self.rank, self.size))

        self._connect_by(connect, self.failures.check)
        return made[0]

    def _connect_by(self, connect: Callable[[Any], None], look: Callable[[], None]) -> None:
        """Calls `connect` with a store whose waits end if `look` raises. Raises PeerError."""
        waiting = self.notes.polled(self.timeout_s, look)

        def end(error: BaseException) -> None:
            waiting.end()
            self._end_by(error)

        started = time.perf_counter()
        try:
            wait_interruptibly(partial(connect, waiting), look, end)
        except RuntimeError as error:
            with contextlib.suppress(RuntimeError):  # the process that keeps the store is gone
                look()  # it knows which rank is gone
            waited_s = time.perf_counter() - started
            # gloo calls it a timeout, too, when nothing listens any more.
            why = "broken off" if waited_s < self.timeout_s / 2 else str(error)
            raise self.failure(self.others[0], "hetero's start", why, waited_s) from error
        waiting.connected()

    def name(self, peer: int) -> str:
        """A member's name as users know it: "rank 3" of the world."""
        return f"rank {self.ranks[peer]}"

    def connection(self, channel: Channel, what: str) -> Any:
        """A channel's process group. Raises PeerError after close(), or if it is broken off."""
        if self.failures.own_end is not None:
            raise PeerError(f"{self.failures.own_end}; {what} needs other ranks")
        if not self._groups:
            raise PeerError(f"{what} needs other ranks, and this engine's connections are closed")
        return self._groups[channel]

    # Failures

    def wait(self, wait: Callable[[timedelta], object], peer: int, what: str) -> None:
        """Calls `wait` for one transfer with `peer`, which `what` names in the error.

        It gets the time limit, and raises RuntimeError if the transfer fails. Raises PeerError. If
        a signal handler raises meanwhile, as Ctrl-C's does, this rank ends for the others.
        """
        started = time.perf_counter()
        try:
            if None in self._given_up:
                raise RuntimeError("the connections are broken off")
            limit = timedelta(seconds=self.timeout_s)
            wait_interruptibly(
                partial(wait, limit),
                self._while_waiting,
                self._end_by,
                lambda: self._while_waiting.look_s,
            )
        except RuntimeError as error:
            waited_s = time.perf_counter() - started
            raise self.failure(peer, what, str(error), waited_s) from error

    def wait_for_job(self, job: WaitingJob) -> None:
        """Until a thread of this rank has run a job in which it waits for the other members.

        Raises what the job raised. A signal handler's exception is as in wait().
        """
        look_s = lambda: self._while_waiting.look_s  # noqa: E731
        wait_for_job(job, self._while_waiting, self._end_by, look_s)

    def failure(self, peer: int, what: str, why: str, waited_s: float | None = None) -> PeerError:
        """The error for a failed transfer with `peer`; it names the first failure too, if known.

        `waited_s`: for how long it was waited for; None if that is not known.
        """
        if self.failures.own_end is not None:
            return PeerError(f"{self.failures.own_end}; {what} needs other ranks")
        if None in self._given_up:
            return self._given_up_error(what)
        end = self._end_of(peer)
        if end is not None:
            fact = f"{end.why} ({self.name(self.rank)} needed it for {what})"
        elif "imed out" in why:
            within = "in time" if waited_s is None else f"within {waited_s:.0f} s"
            fact = (
                f"{self.name(peer)} did not take part in {what} {within}; "
                f"{self._whereabouts(peer)}. All ranks must make the same calls; raise "
                f"rank_timeout_s (now {self.timeout_s:g}) if it is only slow"
            )
        else:
            fact = f"{self.name(peer)} is gone (during {what}): look at its own error"
        self.failures.note(self.ranks[peer], fact)
        first = self.failures.first
        assert first is not None
        cause = "" if first[0] == self.ranks[peer] else f"; before that: {first[1]}"
        return PeerError(f"{fact}{cause}")

    def _given_up_error(self, what: str) -> PeerError:
        """The error after this rank has broken off connections, which no other rank has caused."""
        first = self.failures.first
        cause = "" if first is None else f", because {first[1]}"
        return PeerError(f"{self.name(self.rank)} has given up {what}{cause}")

    def failure_of_all(
        self, operation: RankOperation, what: str, why: str, waited_s: float | None = None
    ) -> PeerError:
        """The error for a common operation that failed; it names a rank that did not take part."""
        if operation.channel in self._given_up:
            return self._given_up_error(what)
        closed = self._closed_error(operation, what)
        if closed is not None:
            return closed
        if self.failures.own_end is None:
            if "imed out" in why:
                return self.failure(self._missing(operation), what, why, waited_s)
            peer = self._broken_peer(operation.channel)
            if peer is not None:
                return self.failure(peer, what, why, waited_s)
        return self.failure(self.others[0], what, why, waited_s)

    def _closed_error(self, operation: RankOperation, what: str) -> PeerClosedError | None:
        """The error of an all-gather that is in vain because a member has closed its engine.

        That is no failure, because what the member has can still be read from it. It may also have
        taken part in this all-gather, and a rank that knew of its end have broken off the channel.
        None if it is something else.
        """
        is_failure = self.failures.own_end is not None or self.failures.first is not None
        if operation.channel is not Channel.GATHERS or is_failure:
            return None
        ends = [end for end in map(self._end_of, self.others) if end is not None]
        if not ends or not all(end.answers for end in ends):
            return None
        return PeerClosedError(f"{ends[0].why} ({self.name(self.rank)} needed it for {what})")

    def _broken_peer(self, channel: Channel) -> int | None:
        """A member whose connection is broken: the first that is known, else one that told its end,
        else one that nothing more can be received from."""
        until = time.monotonic() + _NOTICE_S
        while self.failures.first is None and time.monotonic() < until:
            time.sleep(0.01)
        first = self.failures.first
        if first is not None and first[0] in self.ranks:
            return self.ranks.index(first[0])
        ended = [peer for peer in self.others if self._end_of(peer) is not None]
        if ended:
            return ended[0]
        return next((p for p in self.others if self._is_unreachable(p, channel)), None)

    def _is_unreachable(self, peer: int, channel: Channel) -> bool:
        """Whether the connection is closed on its side. It is of no use afterwards in any case."""
        try:
            nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
            self._groups[channel].recv([nothing], peer, _NEVER_SENT).wait(AT_ONCE)
        except RuntimeError as error:
            return "imed out" not in str(error)
        return False

    def _missing(self, operation: RankOperation) -> int:
        """A member that does not wait in the operation: rather one that waits nowhere."""
        waits = {peer: self.notes.wait_of(peer) for peer in self.others}
        nowhere = [peer for peer, wait in waits.items() if wait is None]

        def is_here(there: RankOperation) -> bool:  # (an all-gather is made in several operations)
            is_gather = operation.channel is there.channel is Channel.GATHERS
            return is_gather or there == operation

        elsewhere = [peer for peer, wait in waits.items() if wait and not is_here(wait[0])]
        return [*nowhere, *elsewhere, *self.others][0]

    def _whereabouts(self, peer: int) -> str:
        """Where a member is that did not come."""
        wait = self.notes.wait_of(peer)
        if wait is None:
            return f"it hangs, is much slower, or runs other code than {self.name(self.rank)}"
        return f"it waits in {wait[1]}"

    # The end

    def tell_end(self, why: str, answers: bool = False) -> None:
        """Tells the other members that this one makes no more common operations, and why.

        A wait for one that it has not made ends then. What it has made, and answers to requests,
        arrive as before; with `answers` it also goes on answering those that are made later, until
        the other members have ended, too.
        """
        made = [self._begun[channel] for channel in Channel]
        self.notes.leave("end", json.dumps(asdict(End(made, why, answers))))
        with contextlib.suppress(RuntimeError):  # the process that keeps the store is gone
            self.notes.store.set("ended", "")

    def _end_of(self, peer: int) -> End | None:
        """What `peer` told, if it has ended."""
        found = self.notes.find("end", peer)
        return None if found is None else End(**json.loads(found))

    def look(self, operation: RankOperation, what: str) -> None:
        """Raises PeerError if a wait for a common operation is in vain; does what can be done."""
        self._while_waiting()
        with contextlib.suppress(RuntimeError):  # the process that keeps the store is gone
            if not self.notes.store.check(["ended"]):
                return
        for peer in self.others:
            end = self._end_of(peer)
            if end is not None and end.made[operation.channel] <= operation.number:
                raise self._closed_error(operation, what) or self.failure(peer, what, end.why)

    def wait_for(self, has_ended: threading.Event, operation: RankOperation, what: str) -> None:
        """Until another thread of this rank has ended what began with a common operation.

        Does for other ranks what can be done meanwhile. Raises PeerError if the wait is in vain.
        """
        try:
            while not has_ended.wait(self._while_waiting.look_s):
                deliver_signals()
                self.look(operation, what)
        except PeerError:
            self.break_off()
            raise
        except BaseException as error:  # a signal's: the memory may have another use afterwards
            self._end_by(error)
            raise

    def _end_by(self, error: BaseException) -> None:
        self.failures.end(f"{self.name(self.rank)} ended by {name_error(error)}")

    def break_off(self, only: Channel | None = None) -> None:
        """Ends transfers and waits, of all channels or of one, here and on the other members.

        Idempotent.
        """
        self._given_up.add(only)
        for channel, group in [*self._groups.items(), *self._return_groups.items()]:
            if only is None or only is channel:
                # gloo closes all connections of a group of which one transfer has timed out; it
                # has no other way to end what waits for them. A connection that is closed already
                # fails at once, and leaves the others open.
                for peer in self.others:
                    with contextlib.suppress(RuntimeError):
                        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                        group.recv([nothing], peer, _NEVER_SENT).wait(AT_ONCE)

    def close(self) -> None:
        """Drops the connections."""
        self._groups, self._return_groups = {}, {}
