"""Work that is under way in the background, and threads that do it."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

THREAD_PREFIX = "hetero-"  # of the names of all threads of this project
_END_S = 5.0  # for what workers are at when the program ends


class Operation(Protocol):
    """Something under way: a transfer of a disk or a link, or several one after another."""

    def wait(self) -> None:
        """Blocks until it is done. Raises an OSError if it failed."""

    def cancel(self) -> None:
        """Its result is not needed: wait(), which is called nevertheless, may end early."""


class Transfer(Operation, Protocol):
    """An operation that can also be asked whether it is done."""

    def done(self) -> bool:
        """Whether wait() returns, or raises, at once."""


def in_background() -> bool:
    """Whether the caller's thread is one of this project's, for whose end closing waits."""
    return threading.current_thread().name.startswith(THREAD_PREFIX)


def cancelled() -> OSError:
    """The error of an operation that was cancelled."""
    return OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))


class Worker:
    """Does jobs one after another in a thread, which starts with the first job.

    A job must not raise: what goes wrong it tells to those who need what it does.
    """

    def __init__(
        self, name: str, idle_s: float | None = None, end: Callable[[], object] | None = None
    ) -> None:
        """No thread runs yet.

        Args:
            name: the thread's, after THREAD_PREFIX.
            idle_s: the thread ends if it has no job for so long; the next job starts another.
            end: makes what a job waits for fail; called if the program ends before close().
        """
        self._idle_s = idle_s
        self.end = end
        self._name = THREAD_PREFIX + name
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None: the end
        self._lock = threading.RLock()  # reentrant: the garbage collector may close things anywhere
        self._closing = False
        self._thread: threading.Thread | None = None
        _workers.add(self)

    def do(self, job: Callable[[], None]) -> None:
        """Does `job` after all that were given before it. Not after close()."""
        with self._lock:
            assert not self._closing
            if self._thread is None:
                # A daemon: an engine that was not closed is closed at exit, after other threads.
                # If it was not closed even then, _end_workers() waits for the thread.
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            self._jobs.put(job)

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._idle_s)
            except Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._thread = None
                        return
                continue
            if job is None:
                return
            job()
            del job  # with all it refers to, before the next one is waited for

    def close(self, timeout_s: float | None = None) -> None:
        """Does the jobs that are left and ends the thread; idempotent. Not from a job.

        If that takes longer than `timeout_s` seconds, returns while the thread goes on.
        """
        with self._lock:
            self._closing = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join(timeout_s)


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def _end_workers() -> None:
    """Ends the threads of workers that nobody has closed.

    A thread that is in the core when the interpreter ends would come back to one that is gone, by
    which Python (before 3.14) ends the process with SIGABRT.
    """
    workers, until = list(_workers), time.monotonic() + _END_S
    for worker in workers:
        if worker.end is not None:
            with contextlib.suppress(Exception):
                worker.end()
    for worker in workers:
        worker.close(max(0.0, until - time.monotonic()))


# Python calls finalizers in the reverse order of their making: this one after those of engines.
weakref.finalize(_end_workers, _end_workers)
os.register_at_fork(after_in_child=_workers.clear)  # their threads are the parent's


def wait_quietly(op: Operation | None) -> None:
    """Waits for an operation of which nobody needs to know whether it failed."""
    if op is not None:
        with contextlib.suppress(Exception):
            op.wait()
