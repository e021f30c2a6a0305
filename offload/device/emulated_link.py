"""An emulated link between RAM and a device's memory: copies in the background, at a bandwidth.

Each direction has a thread, which makes one copy after another. A copy of n bytes is done not
before n / bandwidth after it was submitted and the one before it was due, so copies add up and idle
time is not saved up. Its bytes arrive part by part over that time.
"""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Literal

from offload import timeline
from offload.memory.operation import Worker

_LEAST_RATE = 1000
_PART_S = 0.01  # the time of a part: for each the thread needs the GIL once
_LEAST_PART_BYTES = 4096
_MOST_PART_BYTES = 64 << 20
_WORDS = {"h2d": "host to device", "d2h": "device to host"}


class LinkCopy:
    """A copy on its way. What it moves is kept until it is done. LinkWay makes and changes it."""

    def __init__(self, way: LinkWay, move: Callable[[int, int], object], nbytes: int) -> None:
        self._way = way
        self._move: Callable[[int, int], object] | None = move
        self.nbytes = nbytes
        self.moved_bytes = 0
        self.submitted_s = time.perf_counter()
        self.has_begun = self.is_cancelled = False
        self._error = 0  # errno
        self._ended = threading.Event()

    def done(self) -> bool:
        """Whether wait() returns, or raises, at once."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Blocks until it is done.

        Raises an OSError if it did not come to its end, and RuntimeError in a forked child.
        """
        if not self.done():
            self._way.require_own()
            self._ended.wait()
        if self._error:
            raise OSError(
                self._error,
                f"copy of {self.nbytes} bytes from {_WORDS[self._way.lane]} failed after "
                f"{self.moved_bytes} bytes: {os.strerror(self._error)}",
            )

    def cancel(self) -> None:
        """What is not copied yet is not needed. Nothing if it is done."""
        self._way.cancel(self)

    def move_next(self, most_bytes: int) -> int:
        """Moves the next bytes, at most so many; returns how many."""
        assert self._move is not None
        nbytes = min(most_bytes, self.nbytes - self.moved_bytes)
        self._move(self.moved_bytes, nbytes)
        self.moved_bytes += nbytes
        return nbytes

    def end(self, error: int) -> None:
        """It is done, or has failed with an errno."""
        self._error, self._move = error, None
        self._ended.set()


class LinkWay:
    """One direction of the link."""

    def __init__(self, lane: Literal["h2d", "d2h"], bytes_per_s: float) -> None:
        """Raises ValueError unless `bytes_per_s` is finite and at least 1000."""
        if not (math.isfinite(bytes_per_s) and bytes_per_s >= _LEAST_RATE):
            raise ValueError(
                f"{lane}_bytes_per_s must be a number of bytes per second of at least "
                f"{_LEAST_RATE}, not {bytes_per_s}"
            )
        self.lane = lane
        self._rate = bytes_per_s
        part_bytes = min(max(bytes_per_s * _PART_S, _LEAST_PART_BYTES), _MOST_PART_BYTES)
        self._part_bytes = int(part_bytes) // 64 * 64  # of whole elements
        self._process = os.getpid()
        self.nbytes = 0  # copied so far
        self.busy_s = 0.0  # that copies took, waiting for the end of their time included
        self._changed = threading.Condition()  # guards all below, and copies until they begin
        self._closing = False
        self._due_s = 0.0  # when the last copy's time is over
        self._busy_until_s = 0.0  # when it was done
        self._faults: list[int] = []  # by copy to begin from now, the errno that it fails with
        self._worker = Worker(lane, end=self._stop)

    def require_own(self) -> None:
        """Raises RuntimeError in a forked child, which has not the thread."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this link belongs to process {self._process}, from which this one was forked"
            )

    def start(self, move: Callable[[int, int], object], nbytes: int) -> LinkCopy:
        """Starts a copy: `move` is given the first byte and the number of bytes of each part.

        Raises RuntimeError after close().
        """
        self.require_own()
        copy = LinkCopy(self, move, nbytes)
        with self._changed:
            if self._closing:
                raise RuntimeError("the link is closed")
            self._worker.do(partial(self._run, copy))
        return copy

    def cancel(self, copy: LinkCopy) -> None:
        """For LinkCopy. Nothing in a forked child."""
        if os.getpid() != self._process:
            return
        with self._changed:
            if copy.done():
                return
            copy.is_cancelled = True
            if copy.has_begun:
                self._changed.notify_all()
            else:
                copy.end(errno.ECANCELED)

    def _run(self, copy: LinkCopy) -> None:
        """In the thread."""
        with self._changed:
            if copy.done():
                return
            copy.has_begun = True
            error = self._faults.pop(0) if self._faults else 0
        start_s = max(copy.submitted_s, self._due_s)
        while not error and copy.moved_bytes < copy.nbytes:
            if self._is_cut(copy):
                error = errno.ECANCELED
                break
            self.nbytes += copy.move_next(self._part_bytes)
            self._due_s = start_s + copy.moved_bytes / self._rate
            with self._changed:
                left_s = self._due_s - time.perf_counter()
                self._changed.wait_for(partial(self._is_cut, copy), left_s)
        if copy.moved_bytes:
            began_s = max(start_s, self._busy_until_s)
            self._busy_until_s = time.perf_counter()
            self.busy_s += self._busy_until_s - began_s
            timeline.note(self.lane, began_s, self._busy_until_s, copy.moved_bytes)
        copy.end(error)

    def _is_cut(self, copy: LinkCopy) -> bool:
        return copy.is_cancelled or self._closing

    def inject(self, nth: int, error: int = errno.EIO, count: int = 1) -> None:
        """For tests: the nth copy to begin from now (from 0), and the `count` - 1 after it, fail
        with `error` and copy nothing."""
        with self._changed:
            self._faults += [0] * (nth + count - len(self._faults))
            self._faults[nth : nth + count] = [error] * count

    def _stop(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def close(self) -> None:
        """Cancels all copies and ends the thread; idempotent."""
        if os.getpid() == self._process:
            self._stop()
            self._worker.close()
