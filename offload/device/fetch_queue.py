"""Chunks for the slots of a device, fetched from RAM over the link.

A chunk whose home is in RAM is copied at once. Others are brought to a slot in RAM first, from the
file or from other ranks, and copied as soon as they are there. Threads wait for both, so compute
waits for nothing that it does not need yet.

Slots in RAM are held only by fetches under way, which end whatever compute does, and a demand goes
before a prefetch; so no fetch can wait for itself. When a chunk changes, its copy on the device is
dropped first, then the copy in RAM, then the shard.
"""

from __future__ import annotations

import copy
import enum
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from offload.cache.slot_cache import HostCopy, SharedCache
from offload.device.backend import Backend
from offload.memory.arena import HostArena
from offload.memory.operation import Operation, Worker, cancelled, wait_quietly


class FetchState(enum.Enum):
    """Where a chunk is on its way, and what it holds."""

    QUEUED = "nothing in RAM; there is no room"
    STAGING = "a slot in RAM, to which its bytes are on their way"
    COPYING = "a slot in RAM, from which its bytes are copied to the device"
    DONE = "nothing in RAM"


@dataclass(eq=False)
class ChunkFetch:
    """A chunk on its way to the device: the Operation that FetchQueue.read() returns.

    Only FetchQueue makes and changes it, under its lock.
    """

    queue: FetchQueue
    chunk: int
    to: torch.Tensor | None  # a view of its slots of the device
    state: FetchState = FetchState.QUEUED
    in_ram: HostCopy | None = None
    copying: Operation | None = None
    is_cancelled: bool = False
    error: BaseException | None = None

    def wait(self) -> None:
        """Until the chunk is on the device; it is the next one that gets room in RAM.

        Raises BudgetError if there is none and none will come, an OSError if a transfer failed.
        """
        self.queue.finish(self)

    def cancel(self) -> None:
        """The chunk is not needed: wait() may end early, with an OSError of ECANCELED."""
        self.queue.cancel(self)


class FetchQueue:
    """Fetches chunks to slots of a device: the Backing of a cache there.

    Only fetches under way hold slots in RAM, and they end whatever compute does; so a chunk that
    compute waits for gets its turn, however few slots there are.
    """

    def __init__(
        self,
        arena: HostArena,
        backend: Backend,
        home: Callable[[int], torch.Tensor | None],
        in_ram: SharedCache,
        used_bytes: Mapping[int, int],
    ) -> None:
        """
        Args:
            arena: The device's slots.
            home: The whole chunk, flat, if its home is in RAM; else None.
            in_ram: Brings the other chunks to RAM.
            used_bytes: How many bytes of a chunk's slots are copied.
        """
        self._arena = arena
        self._backend = backend
        self._home = home
        self._in_ram = in_ram
        self._used_bytes = used_bytes
        self._changed = threading.Condition()  # reentrant; guards all below, and fetches
        self._queue: deque[ChunkFetch] = deque()
        self._under_way = 0  # fetches STAGING or COPYING
        # The last copy from the home of each chunk that is in RAM for good.
        self._from_home: dict[int, Operation] = {}
        self._staging = Worker("staging")
        self._copying = Worker("copying")

    def read(self, chunk: int, slot: int) -> Operation:
        """Starts fetching a chunk to the slots from `slot` on.

        Raises an OSError if the copy of a chunk at home in RAM cannot be started.
        """
        nbytes = self._used_bytes[chunk]
        run = -(-nbytes // self._arena.slot_bytes)
        to = self._arena.view(slot, run, torch.uint8)[:nbytes]
        home = self._home(chunk)
        if home is not None:
            op = self._backend.fetch(to, self._bytes(home, chunk))
            if not self._backend.in_order:
                return op
            self._from_home[chunk] = op
            return _InOrder()
        fetch = ChunkFetch(self, chunk, to)
        with self._changed:
            self._queue.append(fetch)
            self._start_queued()
        return fetch

    def _bytes(self, flat: torch.Tensor, chunk: int) -> torch.Tensor:
        return flat.view(torch.uint8)[: self._used_bytes[chunk]]

    def _is_ordered(self, fetch: ChunkFetch) -> bool:
        """Whether what the device is given now comes after the fetch. Needs the lock."""
        copying = fetch.state is FetchState.COPYING and self._backend.in_order
        return copying or fetch.state is FetchState.DONE

    def _start_queued(self) -> None:
        """Stages chunks of the queue, in order, as far as there is room. Needs the lock."""
        while self._queue:
            fetch = self._queue[0]
            try:
                in_ram = self._in_ram.start(fetch.chunk)
            except Exception as error:
                self._queue.popleft()
                self._end(fetch, error)
                continue
            if in_ram is None:
                return
            self._queue.popleft()
            self._under_way += 1
            fetch.in_ram, fetch.state = in_ram, FetchState.STAGING
            if in_ram.op is None:
                self._copy(fetch, in_ram)
                continue
            try:
                self._staging.do(partial(self._stage, fetch, in_ram))
            except RuntimeError as error:  # its thread cannot start
                self._end(fetch, error)

    def _stage(self, fetch: ChunkFetch, in_ram: HostCopy) -> None:
        """In a thread: waits until RAM has the chunk, and starts its copy."""
        try:
            in_ram.wait()
        except BaseException as error:
            self._end(fetch, error)
        else:
            self._copy(fetch, in_ram)

    def _copy(self, fetch: ChunkFetch, in_ram: HostCopy) -> None:
        assert fetch.to is not None
        with self._changed:
            try:
                if fetch.is_cancelled:
                    raise cancelled()
                op = self._backend.fetch(fetch.to, self._bytes(in_ram.flat, fetch.chunk))
            except BaseException as error:
                self._end(fetch, error)
                return
            fetch.copying, fetch.state = op, FetchState.COPYING
            self._changed.notify_all()
        try:
            self._copying.do(partial(self._wait_copied, fetch, op))
        except RuntimeError as error:  # its thread cannot start
            wait_quietly(op)
            self._end(fetch, error)

    def _wait_copied(self, fetch: ChunkFetch, op: Operation) -> None:
        """In another thread."""
        failure: BaseException | None = None
        try:
            op.wait()
        except BaseException as error:
            failure = error
        self._end(fetch, failure)

    def _end(self, fetch: ChunkFetch, error: BaseException | None) -> None:
        with self._changed:
            if fetch.in_ram is not None:
                fetch.in_ram.release()
                self._under_way -= 1
            fetch.state = FetchState.DONE
            fetch.in_ram = fetch.to = fetch.copying = None
            # Without the frames that the error went through, which hold tensors.
            fetch.error = None if error is None else error.with_traceback(None)
            self._start_queued()
            self._changed.notify_all()

    def cancel(self, fetch: ChunkFetch) -> None:
        """For ChunkFetch."""
        with self._changed:
            fetch.is_cancelled = True
            under_way = fetch.copying or fetch.in_ram
            if under_way is not None:
                under_way.cancel()
            elif fetch.state is FetchState.QUEUED:
                self._queue.remove(fetch)
                self._end(fetch, cancelled())

    def finish(self, fetch: ChunkFetch) -> None:
        """For ChunkFetch: until it is done; it gets room next."""
        with self._changed:
            if fetch in self._queue:
                self._queue.remove(fetch)
                self._queue.appendleft(fetch)
                self._start_queued()
            while not self._is_ordered(fetch):  # else the device waits for the rest
                if fetch.state is FetchState.QUEUED and not self._under_way:
                    # Room comes from fetches alone.
                    self._queue.remove(fetch)
                    self._end(fetch, self._in_ram.no_room(fetch.chunk))
                else:
                    self._changed.wait()
        if fetch.error is not None:
            # A copy: what is raised has the caller's frames, and with them tensors that pin slots.
            raise copy.copy(fetch.error)

    def drop(self, chunk: int) -> None:
        """Until nothing reads the chunk's home in RAM, which is about to change."""
        # A copy that failed is an error of the device, which its next use raises.
        wait_quietly(self._from_home.pop(chunk, None))

    def clear(self) -> None:
        """Until nothing is under way, when no chunk is needed: RAM may then be given back.

        A device that works in order is told to copy, and copies later.
        """
        with self._changed:
            while self._queue or self._under_way:
                self._changed.wait()
        for chunk in list(self._from_home):
            self.drop(chunk)

    def refit(self) -> None:
        """The slots were resized while nothing was under way: nothing is known of them here."""

    def close(self) -> None:
        """Ends the threads, when all fetches are done; idempotent."""
        self._staging.close()
        self._copying.close()
        self._from_home.clear()


class _InOrder:
    """A copy that the device was given: what it is given afterwards comes after the copy."""

    def wait(self) -> None:
        """Nothing: the host need not wait."""

    def cancel(self) -> None:
        """Nothing: a device that works in order leaves nothing out."""
