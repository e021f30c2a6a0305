"""Where ranks meet before they are connected: in torch.distributed's store.

A rank that waits there, or for the others' connections, learns within a moment that another one has
failed, and why (absent()). That the process of another rank has ended, it sees by the connection
that the default process group has to that process, if this group is gloo's: on it each rank sends
one byte when it has been connected, so that receiving that fails if it cannot be connected any
more. NCCL has no such connection; there only whoever started the process sees its end (torchrun
does, and ends the others).
"""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hetero.ranks.waiting import name_error
from offload.errors import PeerError
from offload.memory.operation import Worker

_FIRST_POLL_S, _POLL_S = 0.01, 0.1


class PolledStore(Store):
    """Another store, but a wait for a key is a loop here that asks for it.

    torch.distributed's stores wait in C++, where nothing ends them; and a TCPStore that waits for
    one thread lets no other thread ask for anything, until the time limit. gloo's process groups
    look up this object whenever they use the store, so it must live as long as they do.
    """

    def __init__(self, store: Any, timeout_s: float, look: Callable[[], None]) -> None:
        """Asks `store`. A wait calls `look` meanwhile; what this raises ends the wait."""
        super().__init__()
        self._store = store
        self._timeout_s = timeout_s
        self._look = look
        self._has_ended = False

    def connected(self) -> None:
        """All ranks are connected: nothing is to be looked at any more, or kept for that."""
        self._look = _nothing

    def end(self) -> None:
        """Ends all waits, which raise RuntimeError."""
        self._has_ended = True

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all keys are there.

        Raises RuntimeError after the time limit or end(), and what the look raises.
        """
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        started, poll_s = time.monotonic(), _FIRST_POLL_S
        while not self._store.check(list(keys)):
            if self._has_ended:
                raise RuntimeError("the wait was ended")
            self._look()
            if time.monotonic() - started > timeout_s:
                raise RuntimeError(f"timed out after {timeout_s:g} s")
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _POLL_S)

    def get(self, key: str) -> bytes:
        """The value of the key; waits until it is there."""
        self.wait([key])
        value: bytes = self._store.get(key)
        return value

    # What does not wait

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check(list(keys)))

    def add(self, key: str, value: int) -> int:
        return int(self._store.add(key, value))


def _nothing() -> None:
    """What is looked at when all ranks are connected."""


_LOOK_S = 0.02
_FIRST_TAG = 1 << 30  # on the default process group, where other code has small ones
_TAGS = 1 << 29  # from the first one on, by the names of meetings
_FOREVER = timedelta(days=365)
_FAILED = "failed"  # the key of the text of the first rank that cannot come
_met: dict[str, int] = {}  # meetings by the beginning of their names; they agree on all ranks


@contextmanager
def meet(ranks: Sequence[int], timeout_s: float, before: str = "hetero") -> Iterator[Meeting]:
    """The block begins when all `ranks` of the world, this one among them, have come to theirs.

    Inside it they connect; what is raised there the others are told. `before` is the name of the
    meeting by which they have been connected before, if any. Raises PeerError if a rank did not
    come within `timeout_s`, or cannot come any more; it names the rank and the cause.
    """
    meeting = Meeting(ranks, before)
    try:
        meeting.wait_for_all(timeout_s)
        yield meeting
    except BaseException as error:
        tell_failure(meeting.store, error)
        raise
    finally:
        meeting.end()


class Meeting:
    """Ranks that meet and connect, seen from one that has come.

    Attributes:
        name: the same on all ranks, and no other meeting's.
        store: torch.distributed's, with a prefix of this meeting's own.
    """

    def __init__(self, ranks: Sequence[int], before: str) -> None:
        """This rank comes; the arguments are meet()'s."""
        self._ranks = ranks
        self.name = _next_name(ranks, before)
        self.store = _store_of(self.name)
        self._connected = _Connected(ranks, self.name)

    def look(self) -> None:
        """Raises PeerError if a rank failed, or is gone, before all were connected."""
        gone = list(self._connected.gone)  # before what it told before it ended is looked up
        if self.store.check([_FAILED]):
            raise PeerError(self.store.get(_FAILED).decode())
        if gone:
            raise PeerError(
                f"rank {min(gone)} is gone (its process ended before it was connected): look at "
                f"its own error"
            )

    def wait_for_all(self, timeout_s: float) -> None:
        """Returns when all ranks have come. Raises PeerError."""
        here, started = {rank: f"here/{rank}" for rank in self._ranks}, time.monotonic()
        try:
            self.store.set(here[dist.get_rank()], "")
            while True:
                all_here = self.store.check(list(here.values()))
                self.look()
                if all_here:
                    return
                if time.monotonic() - started > timeout_s:
                    missing = next(r for r, key in here.items() if not self.store.check([key]))
                    raise PeerError(
                        f"rank {missing} did not take part in hetero's start within "
                        f"{timeout_s:.0f} s; it hangs, is much slower, or runs other code than "
                        f"rank {dist.get_rank()}. All ranks must make the same calls; raise "
                        f"rank_timeout_s (now {timeout_s:g}) if it is only slow"
                    )
                time.sleep(_LOOK_S)
        except RuntimeError as error:
            raise PeerError(
                f"torch.distributed's store cannot be reached from rank {dist.get_rank()}, because "
                f"the process that keeps it (torchrun, or else rank 0) is gone: look at its own "
                f"error"
            ) from error

    def end(self) -> None:
        """This rank has been connected, or has told that it failed."""
        self._connected.tell()


def tell_failure(store: Any, error: BaseException) -> None:
    """Tells the others of the meeting that this rank fails before it is connected with them."""
    with contextlib.suppress(RuntimeError):  # the process that keeps the store is gone
        text = f"rank {dist.get_rank()} failed before it met the others: {name_error(error)}"
        store.compare_set(_FAILED, "", text)


def absent(ranks: Sequence[int], error: BaseException) -> None:
    """Instead of meet(): the other ranks' next one raises PeerError, with the text of `error`."""
    if len(ranks) > 1:
        tell_failure(_store_of(_next_name(ranks)), error)


def _next_name(ranks: Sequence[int], before: str = "hetero") -> str:
    name = f"{before}/{'-'.join(map(str, ranks))}"
    number = _met.get(name, 0)
    _met[name] = number + 1
    return f"{name}/{number}"


def _store_of(meeting: str) -> Any:
    store = dist.distributed_c10d._get_default_store()
    return dist.distributed_c10d.PrefixStore(meeting, store)


class _Connected:
    """One byte from each of the other ranks, over the connections of the default process group.

    Attributes:
        gone: the ranks whose processes have ended before they sent theirs.
    """

    def __init__(self, ranks: Sequence[int], meeting: str) -> None:
        """Receives the other ranks' bytes, in a thread each."""
        self.gone: list[int] = []
        self._group, self._tag = _default_gloo(), _FIRST_TAG + zlib.crc32(meeting.encode()) % _TAGS
        self._byte = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._others = [rank for rank in ranks if rank != dist.get_rank() and self._group]
        self._sent: dict[int, Any] = {}
        self._has_told = threading.Event()
        for rank in self._others:
            worker = Worker(f"meeting-{rank}", idle_s=0.0, end=partial(self._give_up, rank))
            worker.do(partial(self._exchange, rank))

    def tell(self) -> None:
        """Sends this rank's byte to each of the others; idempotent."""
        if not self._has_told.is_set():
            for rank in self._others:
                with contextlib.suppress(RuntimeError):
                    self._sent[rank] = self._group.send([self._byte], rank, self._tag)
            self._has_told.set()

    def _exchange(self, rank: int) -> None:
        try:
            self._receive(rank)
        except RuntimeError:
            self.gone.append(rank)
        self._has_told.wait()
        if rank in self._sent:  # gloo leaves out what it has not sent when the handle goes
            with contextlib.suppress(RuntimeError):
                self._sent[rank].wait(_FOREVER)

    def _receive(self, rank: int) -> None:
        self._group.recv([torch.zeros_like(self._byte)], rank, self._tag).wait(_FOREVER)

    def _give_up(self, rank: int) -> None:
        """Ends the threads when the program ends, and with them the default process group.

        As Communicator.break_off() does.
        """
        self._has_told.set()
        with contextlib.suppress(RuntimeError):
            byte = torch.zeros_like(self._byte)
            self._group.recv([byte], rank, _FIRST_TAG - 1).wait(timedelta(milliseconds=1))


def _default_gloo() -> Any:
    """gloo's part of the default process group, whose connections last; None if it has none."""
    group = dist.distributed_c10d._get_default_group()
    with contextlib.suppress(RuntimeError):
        backend = group._get_backend(torch.device("cpu"))
        if isinstance(backend, dist.ProcessGroupGloo):
            return backend
    return None
