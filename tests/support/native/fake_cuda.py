"""A device of CUDA's kind without one: streams that do their work as late as they may.

Its memory is RAM, and its kernels are native/update/cuda/update.cu compiled for the host. Compute,
which is torch on the CPU, is done at once, or, for tests of the order alone, is given as functions.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from ctypes import c_char_p, c_uint, c_void_p
from functools import cache
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload import _native
from offload._native import UpdateKind
from offload.device.cuda_runtime import Event, mean_of_rows
from offload.memory.arena import HostArena
from tests.support.cuda.fake_driver import CONTEXT, FakeDriver, FakeEvent
from tests.support.cuda.fake_nccl import FakeNccl
from tests.support.cuda.stream_order import HOST, Clock, StreamOrder
from tests.support.native.native_build import CXX, ROOT, cached, succeed

PAGE = 4096


class FakeStream:
    """Work in order; `eager`: done when it is given."""

    def __init__(self, eager: bool) -> None:
        self.eager = eager
        self.queue: deque[Callable[[], bool]] = deque()  # each says whether it could be done


class Recording:
    """A moment in a stream."""

    def __init__(self, stream: FakeStream, before: Clock) -> None:
        self.stream = stream
        self.before = before
        self.come = False


class FakeRuntime:
    """As offload.device.cuda_runtime.CudaRuntime says."""

    device = torch.device("cpu")  # subclasses have others, whose memory is RAM, too
    dlpack_device = (1, 0)  # kDLCPU

    def __init__(
        self,
        total: int = 1 << 30,
        page_lockable: bool = True,
        eager: bool = True,
        nccl: bool = False,
    ) -> None:
        """`total` bytes of memory; not `eager`: compute is given by give(); `nccl`: it has that."""
        self.total = total
        self._has_nccl = nccl
        self.page_lockable = page_lockable
        self.taken: dict[int, int] = {}  # by address, of tensors that live
        self.cached = 0  # given back by tensors, and not to the device
        self.peak = 0
        self.page_locked: dict[int, int] = {}
        self.copying: list[tuple[int, int]] = []  # addresses and bytes of copies to come
        self.synchronized = 0  # how often the host waited
        self.launched = 0  # kernels
        self.compute = FakeStream(eager)
        self.streams = [self.compute]
        self.failure: str | None = None  # of every copy from now on
        self.captures = False  # whether a graph is being captured
        # By stream and bytes, the memory that was freed last.
        self.freed: dict[tuple[FakeStream, int], torch.Tensor] = {}
        self.lock = threading.RLock()
        # Told when other devices have sent something, for which a stream here may wait.
        self.arrived = threading.Condition(self.lock)
        self.collectives = 0  # under way with other devices
        self.current = threading.local()
        self.events: weakref.WeakSet[FakeEvent] = weakref.WeakSet()  # that somebody has
        # Of an address on the device, where its memory is for a copy; and for kernels to run in.
        self.real: Callable[[int], int] = lambda address: address
        self.exposed: Callable[[], AbstractContextManager[object]] = nullcontext
        self.driver = FakeDriver(self)
        self.order = StreamOrder()

    # Streams

    def new_stream(self) -> FakeStream:
        self.streams.append(FakeStream(eager=False))
        return self.streams[-1]

    def current_stream(self) -> FakeStream:
        return getattr(self.current, "stream", self.compute)

    @property
    def default_stream(self) -> FakeStream:
        return self.compute

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream()
        self.current.stream = stream
        try:
            yield
        finally:
            self.current.stream = before

    def capturing(self) -> bool:
        return self.captures

    def give(
        self,
        stream: FakeStream,
        work: Callable[[], object],
        reads: Sequence[tuple[int, int]] = (),
        writes: Sequence[tuple[int, int]] = (),
    ) -> None:
        """`reads` and `writes`: what memory the work uses, as addresses and bytes."""

        def do() -> bool:
            work()
            return True

        self.give_when(stream, do, reads, writes)

    def give_when(
        self,
        stream: FakeStream,
        work: Callable[[], bool],
        reads: Sequence[tuple[int, int]] = (),
        writes: Sequence[tuple[int, int]] = (),
    ) -> None:
        """As give(), for work that says whether it could be done."""
        with self.lock:
            self.order.use(stream, reads, writes=False)
            self.order.use(stream, writes, writes=True)
            stream.queue.append(work)
            if stream.eager:
                self._run(stream)

    def record(self, stream: FakeStream) -> Event:
        event = FakeEvent()
        event.last = self.recording(stream)
        self.events.add(event)
        return event

    def recording(self, stream: FakeStream) -> Recording:
        """The end of what `stream` has now."""
        with self.lock:
            recording = Recording(stream, self.order.now(stream))
            self.give(stream, lambda: setattr(recording, "come", True))
        return recording

    def moment(self, event: Event) -> Recording:
        """What the event stands for."""
        found: Recording = event.last
        return found

    def wait(self, stream: FakeStream, event: Event) -> None:
        self.wait_for(stream, self.moment(event))

    def wait_for(self, stream: FakeStream, recording: Recording) -> None:
        """As wait(), for a moment."""
        with self.lock:
            self.order.after(stream, recording.before)
            stream.queue.append(lambda: recording.come)
            if stream.eager:
                self.come_to(recording)
                self._run(stream)

    def done(self, event: Event) -> bool:
        recording = self.moment(event)
        with self.lock:
            if recording.come:
                self.order.after(HOST, recording.before)
            return recording.come

    def comes_within(self, event: Event, seconds: float) -> bool:
        recording, until_s = self.moment(event), time.monotonic() + seconds
        with self.lock:
            while not recording.come and time.monotonic() < until_s:
                if not any(self.step(stream) for stream in (recording.stream, *self.streams)):
                    self.arrived.wait(max(0.0, until_s - time.monotonic()))
        return self.done(event)

    def synchronize(self, event: Event) -> None:
        if not self.reach(self.moment(event)):
            raise RuntimeError(self.failure)

    def reach(self, recording: Recording) -> bool:
        """The host waits for a moment; whether nothing has failed."""
        with self.lock:
            self.synchronized += 1
            self.come_to(recording)
            self.order.after(HOST, recording.before)
            return self.failure is None

    def synchronize_all(self) -> None:
        with self.lock:
            while any(stream.queue for stream in self.streams):
                if not any(self.step(stream) for stream in self.streams):
                    self._wait_for_others()
            for stream in self.streams:
                self.order.after(HOST, self.order.now(stream))

    def step(self, stream: FakeStream) -> bool:
        """Does the next thing of a stream, if it has one and can."""
        with self.lock:
            before, self.current.on_device = self.is_on_device, True
            try:
                if stream.queue and stream.queue[0]():
                    stream.queue.popleft()
                    return True
                return False
            finally:
                self.current.on_device = before

    @property
    def is_on_device(self) -> bool:
        """Whether this thread does the device's work now, whose uses of memory are known."""
        return getattr(self.current, "on_device", False)

    def come_to(self, recording: Recording) -> None:
        """The device comes to a moment, of which the host does not know. Needs the lock."""
        while not recording.come:
            self._step_one(recording.stream)

    def _run(self, stream: FakeStream) -> None:
        while stream.queue:
            self._step_one(stream)

    def _step_one(self, stream: FakeStream) -> None:
        """Does the next thing of a stream, or of those that it waits for. Needs the lock."""
        if not self.step(stream):
            others = [s for s in self.streams if s is not stream]
            if not any(self.step(s) for s in others):
                self._wait_for_others()

    def _wait_for_others(self) -> None:
        """Until other devices have sent something. Needs the lock, which it gives up."""
        assert self.collectives, "streams hang"
        self.arrived.wait()

    # Copies

    def copy(self, to: torch.Tensor, source: torch.Tensor, stream: FakeStream) -> None:
        assert to.nbytes == source.nbytes
        memory = [StorageWeakRef(side.untyped_storage()) for side in (to, source)]

        def check() -> None:
            assert not any(m.expired() for m in memory), "a copy's memory is gone before it is done"

        self.copy_bytes(to.data_ptr(), source.data_ptr(), to.nbytes, stream, check)

    def copy_bytes(
        self,
        to: int,
        source: int,
        nbytes: int,
        stream: FakeStream,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Between addresses; `check` is called before it is done. The caller keeps the memory."""
        sides = [(to, nbytes), (source, nbytes)]
        with self.lock:  # threads page-lock RAM meanwhile
            self._check_page_locked(sides)
            if self.compute.eager:
                self.forget(to, nbytes)
            self.copying += sides

        def work() -> None:
            check()
            ctypes.memmove(self.real(to), self.real(source), nbytes)
            for side in sides:
                self.copying.remove(side)

        self.give(stream, work, reads=[(source, nbytes)], writes=[(to, nbytes)])

    def forget(self, address: int, nbytes: int) -> None:
        """Who reads the memory before what is on its way is there, reads this. Needs the lock.

        Not where something that was given before, and is still to be done, needs what is there.
        """
        if not self._is_copied(address, nbytes):
            ctypes.memset(self.real(address), 0xFF, nbytes)

    def handle(self, event: Event) -> int:
        return self.driver.handle(self.moment(event), event)

    def offload_queue(self, stream: FakeStream, buffers: HostArena) -> _native.OffloadQueue:
        sizes = buffers.address(0), buffers.slots, buffers.slot_bytes
        return _native.OffloadQueue(
            self.driver.functions, CONTEXT, self.driver.handle(stream), *sizes
        )

    def _check_page_locked(self, sides: Sequence[tuple[int, int]]) -> None:
        """One side is within one range of pinned RAM."""
        found = 0
        for at, nbytes in sides:
            # (What autograd made counts as the device's.)
            for begin, length in self.page_locked.items():
                if begin <= at < begin + length:
                    assert at + nbytes <= begin + length, "a copy spans two pinned ranges"
            found += any(a <= at < a + n for a, n in self.page_locked.items())
        assert found == self.page_lockable

    # Memory

    def empty(self, nbytes: int) -> torch.Tensor:
        with self.lock:
            in_use = sum(self.taken.values())
            if in_use + nbytes > self.total:
                raise torch.OutOfMemoryError(f"fake CUDA out of memory: tried to allocate {nbytes}")
            # As torch: what was given back is used again, and goes to the device before it is full.
            self.cached = min(max(0, self.cached - nbytes), self.total - in_use - nbytes)
            # As torch, what was freed is used again at once, whatever work still reads it, in the
            # stream that it was taken for.
            stream = self.current_stream()
            raw = self.freed.pop((stream, nbytes), None)
            if raw is None:
                raw = torch.full((nbytes + PAGE,), 0xFF, dtype=torch.uint8, device=self.device)
            begin = -raw.data_ptr() % PAGE  # page by page, as arenas want it
            block = raw[begin : begin + nbytes]
            self.taken[block.data_ptr()] = nbytes
            self.peak = max(self.peak, self._reserved())
        weakref.finalize(block, self._free, block.data_ptr(), raw, stream)
        return block

    def upload(self, content: bytes) -> torch.Tensor:
        block = self.empty(len(content))
        address = block.data_ptr()
        self.give(self.compute, lambda: ctypes.memmove(self.real(address), content, len(content)))
        return block

    def memory_at(self, block: torch.Tensor) -> torch.Tensor:
        """The block's memory as work on the device has it: it does not keep the block."""
        raw = (ctypes.c_uint8 * block.nbytes).from_address(block.data_ptr())
        return torch.frombuffer(raw, dtype=torch.uint8)

    def _free(self, address: int, raw: torch.Tensor, stream: FakeStream) -> None:
        with self.lock:
            nbytes = self.taken.pop(address, 0)
            # Its next user's work is in the stream that it was taken for, and may write at once.
            self.order.use(stream, [(address, nbytes)], writes=True)
            self.cached += nbytes
            self._give_up(self.freed.get((stream, nbytes)))
            self.freed[stream, nbytes] = raw

    def _reserved(self) -> int:
        return sum(self.taken.values()) + self.cached

    def empty_cache(self) -> None:
        self.cached = 0
        for raw in self.freed.values():
            self._give_up(raw)
        self.freed.clear()

    def _give_up(self, raw: torch.Tensor | None) -> None:
        """The memory, if any, is no device's any more."""
        if raw is not None:
            self.order.forget(raw.data_ptr(), raw.nbytes)

    # Other devices

    def collective_name(self) -> str | None:
        return str(os.getpid()) if self._has_nccl else None

    def process_group(self, store: Any, rank: int, size: int) -> FakeNccl:
        return FakeNccl(self, store, rank, size)

    def register(self, address: int, nbytes: int) -> str | None:
        assert address % PAGE == nbytes % PAGE == 0
        assert nbytes
        if not self.page_lockable:
            return "operation not supported"
        assert not any(
            a < address + nbytes and address < a + n for a, n in self.page_locked.items()
        )
        with self.lock:
            self.page_locked[address] = nbytes
            self.order.forget(address, nbytes)
        return None

    def unregister(self, address: int) -> None:
        with self.lock:
            nbytes = self.page_locked.pop(address)
            self.order.use(HOST, [(address, nbytes)], writes=True)  # which has waited for copies

    def _is_copied(self, address: int, nbytes: int) -> bool:
        """Whether a copy that is not done uses a byte of the memory."""
        return any(a < address + nbytes and address < a + n for a, n in self.copying)

    def memory(self) -> tuple[int, int]:
        with self.lock:
            return self.total - self._reserved(), self.total

    def torch_bytes(self) -> tuple[int, int, int]:
        with self.lock:
            return sum(self.taken.values()), self._reserved(), self.peak

    def reset_peak(self) -> None:
        with self.lock:
            self.peak = self._reserved()

    # Kernels

    def kernels(self, kind: UpdateKind) -> HostKernels:
        return HostKernels(self, kind)

    def mean(self, parts: torch.Tensor, target: torch.Tensor) -> None:
        self.give(self.current_stream(), lambda: mean_of_rows(parts, target))


class HostKernels:
    """The kernels of one kind on the host."""

    def __init__(self, runtime: Any, kind: UpdateKind) -> None:
        """`runtime` has give() and exposed(), and counts in `launched`."""
        self._runtime = runtime
        self._kind = kind

    def close(self) -> None:
        pass

    def launch(
        self, kernel: str, blocks: int, arguments: Sequence[Any], stream: FakeStream
    ) -> None:
        if blocks == 0:
            return
        self._runtime.launched += 1
        # As the driver, it has the arguments' values from now on, whatever becomes of the objects.
        copies = [type(one).from_buffer_copy(one) for one in arguments]

        def run() -> None:
            pointers = (c_void_p * len(copies))(*(ctypes.addressof(one) for one in copies))
            number = hash(self._kind)
            with self._runtime.exposed():
                failed = _library().hetero_on_host(number, kernel.encode(), blocks, pointers)
            assert not failed, kernel

        self._runtime.give(stream, run)


@cache
def _library() -> ctypes.CDLL:
    """native/update/cuda/update.cu for the host."""
    library = _compiled()
    library.hetero_on_host.argtypes = (c_uint, c_char_p, c_uint, c_void_p)
    return library


def _compiled() -> ctypes.CDLL:
    """Compiled once for all processes, as long as no source changes."""
    flags = ["-std=c++20", "-O2", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared"]
    quiet = ["-Wall", "-Wno-unknown-pragmas", "-Werror"]
    source = ROOT / "tests/native/cuda_host/on_host.cpp"
    command = [CXX, *flags, *quiet, f"-I{ROOT / 'native'}", str(source)]
    sources = [source, *sorted((ROOT / "native" / "update").rglob("*.*"))]
    made = cached(
        "on_host.so", [*flags, *quiet], sources, lambda at: succeed([*command, "-o", str(at)])
    )
    return ctypes.CDLL(str(made))
