"""Where ranks meet before they are connected: in torch.distributed's store.

A rank that waits there, or for the others' connections, learns within a moment that another one has
failed, and why (absent()), and that the process of one that has come has ended, if it ran on this
machine. Of others whoever started the process sees the end (torchrun does, and ends all), or the
time limit tells.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hetero.ranks.start.machine import processes_id
from hetero.ranks.waiting import name_error
from offload.errors import PeerError

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
        self._processes: dict[int, int] = {}  # of ranks of this machine that have come

    def look(self) -> None:
        """Raises PeerError if a rank failed, or is gone, before all were connected."""
        # Before what it told before it ended is looked up.
        gone = [rank for rank, process in self._processes.items() if not _is_alive(process)]
        if self.store.check([_FAILED]):
            raise PeerError(self.store.get(_FAILED).decode())
        if gone:
            raise PeerError(
                f"rank {min(gone)} is gone (its process ended before it was connected): look at "
                f"its own error"
            )

    def wait_for_all(self, timeout_s: float) -> None:
        """Returns when all ranks have come. Raises PeerError."""
        missing, started = dict.fromkeys(self._ranks), time.monotonic()
        try:
            mine = processes_id()
            self.store.set(f"here/{dist.get_rank()}", f"{mine} {os.getpid()}")
            while True:
                for rank in [r for r in missing if self.store.check([f"here/{r}"])]:
                    del missing[rank]
                    found, process = map(int, self.store.get(f"here/{rank}").split())
                    if found == mine:
                        self._processes[rank] = process
                self.look()
                if not missing:
                    return
                if time.monotonic() - started > timeout_s:
                    raise PeerError(
                        f"rank {next(iter(missing))} did not take part in hetero's start within "
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


def _is_alive(process: int) -> bool:
    """Whether the process of that number has not ended."""
    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


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
