"""NCCL's process group between fake devices of several processes: bytes go by gloo.

As torch's, a collective begins when the stream that was the current one has done what it had. It is
in a stream of its own, whose end that of work.wait() waits for; nobody waits on the host. What it
receives is there as late as it may be. If another process dies, it does not end before abort().
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from tests.support.native.fake_cuda import FakeRuntime, Recording

_FOREVER = timedelta(days=1)
_LOOK = timedelta(milliseconds=20)
Exchange = Callable[[torch.Tensor, torch.Tensor], Any]  # what is received, what is sent


@dataclass(eq=False)
class _Collective:
    """One that the device was given."""

    ready: Recording  # when what it sends is there
    exchange: Exchange
    to: int
    to_bytes: int
    source: int
    source_bytes: int
    received: torch.Tensor | None = None


class FakeWork:
    """torch.distributed's work."""

    def __init__(self, runtime: FakeRuntime, end: Recording) -> None:
        self._runtime = runtime
        self._end = end

    def wait(self, timeout: timedelta | None = None) -> bool:
        """The current stream waits."""
        self._runtime.wait_for(self._runtime.current_stream(), self._end)
        return True

    def is_completed(self) -> bool:
        return self._end.come


class FakeNccl:
    """The methods of torch.distributed's ProcessGroupNCCL that are used."""

    def __init__(self, runtime: FakeRuntime, store: Any, rank: int, size: int) -> None:
        self._runtime = runtime
        self._gloo = dist.ProcessGroupGloo(store, rank, size, _FOREVER)
        self._stream = runtime.new_stream()
        self._given: SimpleQueue[_Collective | None] = SimpleQueue()
        self._is_aborted = False
        self._thread = threading.Thread(target=self._work, name="fake-nccl", daemon=True)
        self._thread.start()

    def size(self) -> int:
        return int(self._gloo.size())

    def _allgather_base(self, to: torch.Tensor, source: torch.Tensor) -> FakeWork:
        assert to.numel() == source.numel() * self._gloo.size()
        return self._give(self._gloo._allgather_base, to, source)

    def alltoall_base(
        self, to: torch.Tensor, source: torch.Tensor, to_sizes: list[int], sizes: list[int]
    ) -> FakeWork:
        assert not to_sizes
        assert not sizes
        assert to.numel() == source.numel()
        return self._give(lambda t, s: self._gloo.alltoall_base(t, s, [], []), to, source)

    def _give(self, exchange: Exchange, to: torch.Tensor, source: torch.Tensor) -> FakeWork:
        assert to.is_contiguous()
        assert source.is_contiguous()
        assert not self._is_aborted
        runtime, stream = self._runtime, self._stream
        sides = (to.data_ptr(), to.nbytes), (source.data_ptr(), source.nbytes)
        with runtime.lock:
            runtime.wait(stream, runtime.record(runtime.current_stream()))
            given = _Collective(runtime.recording(stream), exchange, *sides[0], *sides[1])
            self._forget(given)
            runtime.collectives += 1
            runtime.copying += sides
            runtime.give_when(stream, lambda: self._store(given), [sides[1]], [sides[0]])
            end = runtime.recording(stream)
        self._given.put(given)
        return FakeWork(runtime, end)

    def _forget(self, given: _Collective) -> None:
        """What is received; what is sent in place stays."""
        first = given.source - given.to
        if not 0 <= first < given.to_bytes:
            self._runtime.forget(given.to, given.to_bytes)
            return
        after = first + given.source_bytes
        self._runtime.forget(given.to, first)
        self._runtime.forget(given.to + after, given.to_bytes - after)

    def _store(self, given: _Collective) -> bool:
        """In the stream: whether all has come, or will not."""
        if given.received is None and not self._is_aborted:
            return False
        if given.received is not None:
            ctypes.memmove(given.to, given.received.data_ptr(), given.to_bytes)
        self._runtime.collectives -= 1
        for side in ((given.to, given.to_bytes), (given.source, given.source_bytes)):
            self._runtime.copying.remove(side)
        return True

    def _work(self) -> None:
        """In the thread: sends and receives, one collective after the other."""
        while (given := self._given.get()) is not None:
            with self._runtime.lock:
                self._runtime.come_to(given.ready)
                raw = (ctypes.c_uint8 * given.source_bytes).from_address(given.source)
                sent = torch.frombuffer(raw, dtype=torch.uint8).clone()
            received = sent.new_empty(given.to_bytes)
            if self._exchange(given, received, sent):
                with self._runtime.lock:
                    given.received = received
                    self._runtime.arrived.notify_all()

    def _exchange(self, given: _Collective, received: torch.Tensor, sent: torch.Tensor) -> bool:
        """Whether all came; if not, it has been aborted, or another process is gone."""
        try:
            work = given.exchange(received, sent)
        except RuntimeError:
            return False
        while not self._is_aborted:
            try:
                work.wait(_LOOK)
                return True
            except RuntimeError:
                if work.is_completed():  # it has failed, or was done just after its time
                    with suppress(RuntimeError):
                        work.wait()
                        return True
                    return False
        return False

    def abort(self) -> None:
        with self._runtime.lock:
            self._is_aborted = True
            self._runtime.arrived.notify_all()
        self._given.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
