"""Waits for other ranks that Ctrl-C ends, and threads that wait for them.

gloo waits in C++, where Python handles no signals: in the main thread such a wait would last until
the other rank does something. So the main thread has it done by another thread, and itself waits
where signals are handled.

No thread may be in such a wait when the interpreter ends: it would come back to an interpreter that
is gone, by which Python (before 3.14) ends the thread inside of C++ that does not allow it, and
the process by SIGABRT. So all of them are Workers, whose waits are made to fail before that.

A wait that an exception of a signal handler has left cannot be taken up again: messages would be
out of step, and their memory has other uses. So it breaks off the connections, and a program that
catches Ctrl-C there can only close its engine.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from offload.errors import PeerError
from offload.interrupts import deliver_signals
from offload.memory.operation import Worker, in_background

_LONGEST_CAUSE = 1000  # characters of an error that is told to other ranks


class FailedRanks:
    """The ranks that are known to have failed, the first to be known first.

    All communicators of an engine share one, so that errors can name the first cause, and so that
    this rank's end ends all of its connections.

    Attributes:
        own_end: why this rank has broken off its connections; None while it has not.
    """

    def __init__(self) -> None:
        self.own_end: str | None = None
        self._lock = threading.Lock()
        self._why: dict[int, str] = {}
        self._connections: weakref.WeakSet[Any] = weakref.WeakSet()  # Peers

    def note(self, rank: int, why: str) -> None:
        """Notes that rank `rank` (in the world) failed; `why` is a sentence for an error."""
        with self._lock:
            self._why.setdefault(rank, why)

    @property
    def first(self) -> tuple[int, str] | None:
        """The rank that was the first to be known, and why it failed; None if none failed."""
        with self._lock:
            return next(iter(self._why.items()), None)

    def check(self) -> None:
        """Raises PeerError if a rank has failed."""
        if self.first is not None:
            raise PeerError(self.first[1])

    def add(self, connections: Any) -> None:
        """These, which are Peers, end with the others."""
        self._connections.add(connections)

    def tell(self, why: str, answers: bool = False) -> None:
        """Tells the other ranks that this one makes no more common operations, and why.

        `answers`: it goes on answering requests until they have ended, too.
        """
        for connections in list(self._connections):
            connections.tell_end(why, answers)

    def end(self, why: str) -> None:
        """Tells the other ranks that this one ends, and breaks off all connections; idempotent.

        Every wait for another rank ends, here at once and there when the connection breaks.
        """
        if self.own_end is None:
            self.own_end = why
            self.tell(why)
        for connections in list(self._connections):
            connections.break_off()


def name_error(error: BaseException) -> str:
    """The error's class and text, as other ranks are told them."""
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    return text if len(text) <= _LONGEST_CAUSE else f"{text[:_LONGEST_CAUSE]}..."


LOOK_S = 0.1  # how often a wait looks whether it is in vain
SOON_S = 0.002  # the same where other ranks were in need of this one a moment ago
_HELPED_S = 1.0  # so long that moment is
_IDLE_S = 1.0  # after which the thread that waits ends; the next wait starts another
_END_S = 5.0  # for a thread whose connections are broken off to end


class WhileWaiting:
    """What this rank does for other ranks while it waits for them.

    A rank that waits may have what the others need to come to where it waits.
    """

    def __init__(self) -> None:
        self._helps: weakref.WeakSet[Helps] = weakref.WeakSet()
        self._helped_until_s = 0.0

    def add(self, helps: Helps) -> None:
        """`helps.help()` is called in each wait, again and again, as long as `helps` lives."""
        self._helps.add(helps)

    def __call__(self) -> None:
        if not in_background():  # whose work this rank may need for it
            for helps in list(self._helps):
                if helps.help():
                    self._helped_until_s = time.monotonic() + _HELPED_S

    @property
    def look_s(self) -> float:
        """How often to look: soon again after this rank could help."""
        return SOON_S if time.monotonic() < self._helped_until_s else LOOK_S


class Helps(Protocol):
    """What can do something for other ranks."""

    def help(self) -> bool:
        """Does what other ranks need from this one now; returns whether there was anything."""


class WaitingJob:
    """A wait that another thread makes."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self._wait: Callable[[], object] | None = wait
        self._ends: SimpleQueue[None] = SimpleQueue()
        self.failure: BaseException | None = None
        self.has_ended = False  # an exception may take what _ends has, but not this

    def run(self) -> None:
        wait, self._wait = self._wait, None
        assert wait is not None
        try:
            wait()
        except BaseException as error:
            self.failure = error
        self.has_ended = True
        self._ends.put(None)

    def ends_within(self, seconds: float) -> bool:
        """Waits for the end, so long."""
        if not self.has_ended:
            with contextlib.suppress(Empty):
                self._ends.get(timeout=seconds)
        return self.has_ended


# Waits for the main thread, which would start a thread for each wait without it (0.12 ms).
_waiter = Worker("waiting", _IDLE_S)


def _make_waiter() -> None:
    global _waiter
    _waiter = Worker("waiting", _IDLE_S)


os.register_at_fork(after_in_child=_make_waiter)


def wait_for_job(
    job: WaitingJob,
    look: Callable[[], object],
    end: Callable[[BaseException], object],
    look_s: Callable[[], float],
    begin: Callable[[], object] = lambda: None,
) -> None:
    """Until another thread, if need be by `begin`, has run `job`; raises what that raised.

    Else as wait_interruptibly().
    """
    try:
        begin()
        while not job.ends_within(look_s()):
            deliver_signals()
            look()
    except BaseException as error:
        end(error)
        job.ends_within(_END_S)
        raise
    if job.failure is not None:
        # A copy: what is raised has the caller's frames, and with them tensors.
        raise copy.copy(job.failure) from job.failure.__cause__


def wait_interruptibly(
    wait: Callable[[], object],
    look: Callable[[], object],
    end: Callable[[BaseException], object],
    look_s: Callable[[], float] = lambda: LOOK_S,
) -> None:
    """Calls `wait()`, which another rank may let wait, and raises what that raises.

    In the main thread signals are handled meanwhile, and every look_s() seconds `look()` is called,
    which may raise. If either raises, `end` gets the error; it must make `wait()` fail, because
    the memory of what is waited for may have another use afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        wait()
        return
    job = WaitingJob(wait)
    try:
        wait_for_job(job, look, end, look_s, lambda: _waiter.do(job.run))
    finally:
        if not job.has_ended:
            _make_waiter()  # no other wait must come after this one
