"""Waits for other ranks that Ctrl-C ends, and threads that wait for them.

gloo waits in C++, where Python handles no signals: in the main thread such a wait would last until
the other rank does something. So the main thread has it done by another thread, and itself waits
where signals are handled.

No thread may be in such a wait when the interpreter ends: it would come back to an interpreter that
is gone, by which Python (before 3.14) ends the thread inside of C++ that does not allow it, and
the process by SIGABRT. So all that may be in one when the program ends are known here, and are
brought to their end before the interpreter's.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue

from offload.memory.operation import THREAD_PREFIX

LOOK_S = 0.1  # how often a wait looks whether it is in vain
_IDLE_S = 1.0  # after which the thread that waits ends; the next wait starts another
_END_S = 10.0  # for a thread whose connections are broken off to end

_Job = tuple[Callable[[], object], SimpleQueue[BaseException | None]]
_threads: dict[threading.Thread, Callable[[], object]] = {}  # each with what ends its waits


def start_thread(
    name: str, work: Callable[[], object], end: Callable[[], object]
) -> threading.Thread:
    """Starts a thread that waits for other ranks; `end()` makes its waits fail.

    `name` is the thread's, after the prefix of all threads of this project. `end` is called if the
    thread still runs when the program ends.
    """

    def run() -> None:
        try:
            work()
        finally:
            _threads.pop(threading.current_thread(), None)

    # A daemon: an engine that was not closed is closed at exit, after other threads.
    thread = threading.Thread(target=run, name=THREAD_PREFIX + name, daemon=True)
    _threads[thread] = end
    thread.start()
    return thread


def join_all(threads: Iterable[threading.Thread]) -> None:
    """Waits for threads whose waits have been made to fail; not for ever."""
    deadline = time.monotonic() + _END_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _end_threads() -> None:
    """Brings threads that still wait for other ranks to their end."""
    left = dict(_threads)
    for end in left.values():
        with contextlib.suppress(Exception):
            end()
    join_all(left)


# Python calls finalizers in the reverse order of their making: this one after those of engines.
weakref.finalize(_end_threads, _end_threads)
os.register_at_fork(after_in_child=_threads.clear)  # they are the parent's


class _Waiter:
    """Waits for the main thread, in a thread that ends when it has been idle for a while."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def do(self, wait: Callable[[], object], done: SimpleQueue[BaseException | None]) -> None:
        """Calls `wait` and puts what it raises, or None, into `done`."""
        with self._lock:
            self._jobs.put((wait, done))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name=f"{THREAD_PREFIX}waiting", daemon=True
                )
                self._thread.start()

    def _work(self) -> None:
        while True:
            try:
                wait, done = self._jobs.get(timeout=_IDLE_S)
            except Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._thread = None
                        return
                continue
            try:
                wait()
            except BaseException as error:
                done.put(error)
            else:
                done.put(None)
            del wait, done  # with the memory they refer to, before the next one is waited for


_waiter = _Waiter()


def _make_waiter() -> None:
    global _waiter
    _waiter = _Waiter()


os.register_at_fork(after_in_child=_make_waiter)


def wait_interruptibly(
    wait: Callable[[], object],
    look: Callable[[], object],
    end: Callable[[BaseException], object],
) -> None:
    """Calls `wait()`, which another rank may let wait, and raises what that raises.

    In the main thread signals are handled meanwhile, and every LOOK_S seconds `look()` is called,
    which may raise. If either raises, `end` gets the error; it must make `wait()` fail, because
    the memory of what is waited for may have another use afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        wait()
        return
    done: SimpleQueue[BaseException | None] = SimpleQueue()
    waiting = False
    failure = None
    try:
        _waiter.do(wait, done)
        waiting = True
        while True:
            with contextlib.suppress(Empty):
                failure = done.get(timeout=LOOK_S)
                break
            look()
    except BaseException as error:
        end(error)
        if waiting:
            with contextlib.suppress(Empty):
                done.get(timeout=_END_S)
        raise
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # whose frames refer to this one
