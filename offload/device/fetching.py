"""Chunks for the slots of a device, fetched from RAM over the link.

A chunk that is in RAM for good is copied at once. Others are brought to a slot in RAM first
(*staged*), from the file or other ranks, and copied as soon as they are there. Threads wait for
both, so compute waits for nothing that it does not need yet.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from functools import partial

import torch

from offload.device.backend import Backend
from offload.device.staging import Source, Staged
from offload.device.waiter import Waiter
from offload.disk.backing import Operation
from offload.memory.arena import HostArena

_POLL_S = 0.001


class FetchState(enum.Enum):
    """Where a chunk is on its way, and what it holds."""

    QUEUED = "nothing in RAM; there is no room"
    STAGING = "a slot in RAM, to which its bytes are on their way"
    COPYING = "a slot in RAM, from which its bytes are copied to the device"
    DONE = "nothing in RAM"


class Fetch:
    """A chunk on its way to the device."""

    def __init__(self, fetching: Fetching, chunk: int, to: torch.Tensor) -> None:
        self._fetching = fetching
        self.chunk = chunk
        self.to: torch.Tensor | None = to
        self.state = FetchState.QUEUED
        self.staged: Staged | None = None
        self.copy: Operation | None = None
        self.cancelled = False
        self.error: BaseException | None = None

    def wait(self) -> None:
        """Until the chunk is on the device, before others that are queued.

        Raises what bringing it met; BudgetError if there is no room in RAM and none will come.
        """
        self._fetching.finish(self)

    def cancel(self) -> None:
        """Nobody wants it any more: wait() may end early, with an OSError of ECANCELED."""
        self._fetching.cancel(self)


class Fetching:
    """RAM, and what is behind it, as what backs slots of the device.

    Slots in RAM are held by fetches under way alone, which end whatever compute does; so one that
    compute waits for gets its turn, however few slots there are.
    """

    def __init__(
        self,
        arena: HostArena,
        backend: Backend,
        source: Source,
        runs: Mapping[int, int],
        used_bytes: Mapping[int, int],
        patience_s: float = 0.0,
    ) -> None:
        """By chunk: how many slots of `arena` it takes, and how many bytes of them are copied.

        `patience_s`: how long to wait for room in RAM that others than fetches take.
        """
        self._arena = arena
        self._backend = backend
        self._source = source
        self._runs = runs
        self._used_bytes = used_bytes
        self._patience_s = patience_s
        self._changed = threading.Condition()  # guards all below, and fetches
        self._queue: deque[Fetch] = deque()
        self._under_way = 0  # fetches STAGING or COPYING
        # The last copy from the home of each chunk that is in RAM for good.
        self._from_home: dict[int, Operation] = {}
        self._stagers = Waiter("hetero-staging")
        self._copiers = Waiter("hetero-copying")

    def read(self, chunk: int, slot: int) -> Operation:
        """Starts fetching a chunk to the slots from `slot` on."""
        to = self._arena.view(slot, self._runs[chunk], torch.uint8)[: self._used_bytes[chunk]]
        home = self._source.home(chunk)
        if home is not None:
            copy = self._backend.fetch(to, self._bytes(home, chunk))
            if not self._backend.in_order:
                return copy
            self._from_home[chunk] = copy
            return _Given(copy)
        fetch = Fetch(self, chunk, to)
        with self._changed:
            self._queue.append(fetch)
            self._start_queued()
        return fetch

    def settle(self, chunk: int) -> None:
        """Until nothing reads the chunk's home in RAM, which is about to change."""
        copy = self._from_home.pop(chunk, None)
        if copy is not None:
            with contextlib.suppress(OSError):  # who uses the device meets it
                copy.wait()

    def write(self, chunk: int, slot: int) -> Operation:
        """Never: copies on the device are clean."""
        raise AssertionError("copies of parameters are never written")

    def _bytes(self, flat: torch.Tensor, chunk: int) -> torch.Tensor:
        return flat.view(torch.uint8)[: self._used_bytes[chunk]]

    def _start_queued(self) -> None:
        """Stages what is queued, in order, as far as there is room. Needs the lock."""
        while self._queue:
            fetch = self._queue[0]
            try:
                fetch.staged = self._source.start(fetch.chunk)
            except Exception as error:
                self._queue.popleft()
                self._end(fetch, error)
                continue
            if fetch.staged is None:
                return
            self._queue.popleft()
            self._under_way += 1
            fetch.state = FetchState.STAGING
            if fetch.staged.ready:
                self._start_copy(fetch)
            else:
                self._stagers.do(partial(self._stage, fetch))

    def _stage(self, fetch: Fetch) -> None:
        """Waits for the chunk to be in RAM, in a thread."""
        assert fetch.staged is not None
        failure: BaseException | None = None
        try:
            fetch.staged.wait()
        except BaseException as error:
            failure = error
        with self._changed:
            if failure is not None:
                self._end(fetch, failure)
            else:
                self._start_copy(fetch)
            self._start_queued()

    def _start_copy(self, fetch: Fetch) -> None:
        """Needs the lock."""
        assert fetch.staged is not None
        assert fetch.to is not None
        if fetch.cancelled:
            return self._end(fetch, _cancelled())
        try:
            fetch.copy = self._backend.fetch(fetch.to, self._bytes(fetch.staged.flat, fetch.chunk))
        except Exception as error:
            return self._end(fetch, error)
        fetch.state = FetchState.COPYING
        self._copiers.do(partial(self._await_copy, fetch))
        return None

    def _await_copy(self, fetch: Fetch) -> None:
        """Waits for the chunk to be on the device, in a thread."""
        assert fetch.copy is not None
        failure: BaseException | None = None
        try:
            fetch.copy.wait()
        except BaseException as error:
            failure = error
        with self._changed:
            self._end(fetch, failure)
            self._start_queued()

    def _end(self, fetch: Fetch, error: BaseException | None) -> None:
        """Needs the lock."""
        if fetch.state in (FetchState.STAGING, FetchState.COPYING):
            self._under_way -= 1
        fetch.state = FetchState.DONE
        fetch.staged = fetch.to = fetch.copy = None  # the pin on the slot in RAM ends
        # Without the frames it went through, which hold tensors.
        fetch.error = None if error is None else error.with_traceback(None)
        self._changed.notify_all()

    def cancel(self, fetch: Fetch) -> None:
        """Nobody wants it any more."""
        with self._changed:
            fetch.cancelled = True
            if fetch.state is FetchState.QUEUED:
                self._queue.remove(fetch)
                self._end(fetch, _cancelled())
            elif fetch.state is FetchState.STAGING:
                assert fetch.staged is not None
                fetch.staged.cancel()
            elif fetch.state is FetchState.COPYING:
                assert fetch.copy is not None
                fetch.copy.cancel()

    def finish(self, fetch: Fetch) -> None:
        """Until it is done; it is the next to get room."""
        give_up_s = time.monotonic() + self._patience_s
        with self._changed:
            if fetch.state is FetchState.QUEUED:
                self._queue.remove(fetch)
                self._queue.appendleft(fetch)
            while fetch.state is not FetchState.DONE:
                if fetch.state is FetchState.COPYING and self._backend.in_order:
                    return  # the device waits for the rest
                if fetch.state is not FetchState.QUEUED:
                    self._changed.wait()
                    continue
                # Room may also come from others than fetches, who do not tell.
                self._start_queued()
                if fetch.state is not FetchState.QUEUED:
                    continue
                if not self._under_way and time.monotonic() >= give_up_s:
                    self._queue.remove(fetch)
                    self._end(fetch, self._source.no_room(fetch.chunk))
                else:
                    self._changed.wait(_POLL_S)
        if fetch.error is not None:
            raise fetch.error

    def clear(self) -> None:
        """Until nothing is under way, once nobody wants anything: RAM may then be given back.

        A device that works in order is told to copy, and copies later.
        """
        with self._changed:
            while self._queue or self._under_way:
                self._changed.wait()
        for chunk in list(self._from_home):
            self.settle(chunk)

    def refit(self) -> None:
        """The slots were resized while nothing was under way: nothing is known of them here."""

    def close(self) -> None:
        """Ends the threads, when all fetches are done; idempotent."""
        self._stagers.close()
        self._copiers.close()
        self._from_home.clear()


class _Given:
    """A copy that the device was given, which waits for it by itself."""

    def __init__(self, copy: Operation) -> None:
        self._copy = copy

    def wait(self) -> None:
        """The host need not."""

    def cancel(self) -> None:
        """Nobody wants it any more."""
        self._copy.cancel()


def _cancelled() -> OSError:
    return OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
