"""A thread that waits, so that compute need not."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

PREFIX = "hetero-"  # of the names of all our threads


def in_background() -> bool:
    """Whether this is one of our threads, for whose end closing waits."""
    return threading.current_thread().name.startswith(PREFIX)


class Waiter:
    """Does jobs that wait, one after the other, in a thread that starts with the first one.

    A job passes whatever goes wrong to those who need what it does; it must not raise.
    """

    def __init__(self, name: str) -> None:
        """`name` is the thread's."""
        self._name = name
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    def do(self, job: Callable[[], None]) -> None:
        """Does `job` after all before it. Not after close()."""
        with self._changed:
            assert not self._closing
            self._jobs.append(job)
            if self._thread is None:
                # A daemon: an engine that was not closed is closed at exit, after the others ended.
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._jobs:
                    if self._closing:
                        return
                    self._changed.wait()
                job = self._jobs.popleft()
            job()
            del job  # with all it refers to, while there is no other

    def close(self) -> None:
        """Does what is left to do and ends the thread; idempotent. Not from a job."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
