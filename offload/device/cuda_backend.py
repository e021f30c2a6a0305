"""Computes on a GPU.

Compute runs in the current stream, as in torch; copies to the device and copies from it have a
stream each, and the collectives of each group of devices two. The streams wait for each other's
events. The host waits only for copies that read or fill RAM, before that RAM has another use.

RAM is page-locked with cudaHostRegister: exactly what is committed, optimizer state excepted. What
has its home on the device is updated there by the CPU's own kernel templates, compiled at run time
without fused products, so with the same bits; a launch takes tables of addresses, so all tiles of a
step are one launch (two for each chunk with Muon). CUDA graph capture is refused, because hooks do
not run at replay. Tests replace `cuda_runtime.py` by a device that copies as late as it may, gives
freed memory out again at once, and fails if two streams use the same memory and no event orders
them. It was measured on one GPU, an H200; several have not been tried.
"""

from __future__ import annotations

import bisect
import errno
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from offload._native import OffloadOp, OffloadQueue, UpdateKind
from offload.device.backend import DTYPE_NAMES, Backend, check_sides
from offload.device.cuda_runtime import CudaRuntime, Event, Stream
from offload.device.device_arena import DeviceArena, PageLockedArena, check_not_capturing
from offload.device.updater import Updater
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.sizes import format_bytes
from offload.memory.tiers import Account

# The share of the free memory that is for model state, if the user does not say; the rest is for
# activations, gradients and temporaries.
DEFAULT_SHARE = 0.7

_LEAST_CUDA = 12  # its run-time compiler is the first one that knows C++20


def cuda_available() -> bool:
    """Whether torch sees a CUDA device and was built for CUDA 12 or later.

    The kernels of updates on the device are C++20, which NVRTC compiles from CUDA 12 on.
    """
    version = torch.version.cuda
    return (
        torch.cuda.is_available()
        and version is not None
        and int(version.split(".")[0]) >= _LEAST_CUDA
    )


def default_device_bytes(local_ranks: int = 1) -> int:
    """device_memory of each of `local_ranks` on this machine, if the user does not say."""
    free, _ = torch.cuda.mem_get_info()
    return int(free * DEFAULT_SHARE) // -(-local_ranks // torch.cuda.device_count())


class CudaBackend(Backend):
    """torch's current CUDA device, with copies in the background."""

    kind = "cuda"
    separate = True
    in_order = True
    h2d_bytes = 0
    d2h_bytes = 0

    def __init__(self, runtime: CudaRuntime | None = None) -> None:
        """`runtime` is for tests."""
        super().__init__()
        self.runtime = CudaRuntime() if runtime is None else runtime
        self.device = self.runtime.device
        self._fetching = _Way("from RAM to the device", self.runtime.new_stream())
        self._draining = _Way("from the device to RAM", self.runtime.new_stream())
        self._ways = [self._fetching, self._draining]
        # Reentrant: the garbage collector may close what it finds at any time.
        self._lock = threading.RLock()  # guards all below, and the order in the two streams
        self._arenas = _Arenas()
        self._updaters: dict[tuple[UpdateKind, int], Updater] = {}
        self.runtime.reset_peak()

    def arena(self, slots: int, slot_bytes: int, ledger: Ledger, account: Account) -> HostArena:
        made = DeviceArena(self.runtime, slots, slot_bytes, ledger, account)
        with self._lock:
            self._arenas.add(made)
        return made

    def host_arena(
        self, slots: int, slot_bytes: int, ledger: Ledger, account: Account
    ) -> HostArena:
        return PageLockedArena(self.runtime, self.notes, slots, slot_bytes, ledger, account)

    def current_stream(self) -> Stream:
        return self.runtime.current_stream()

    def record_event(self) -> Event:
        check_not_capturing(self.runtime)
        return self.runtime.record(self.current_stream())

    def fetch(self, to: torch.Tensor, source: torch.Tensor) -> _Copy:
        """Starts copying from RAM to the device, after work that uses what `to` holds now.

        `to` is in an arena; work with pinned views of its slots then follows the copy by itself.
        """
        check_sides(to, source)
        with self._lock:
            arena, slot, run = self._arenas.find(to)
            copy = self._start(self._fetching, to, source, arena.before_write(slot, run))
            arena.written(slot, run, copy.event)
            self.h2d_bytes += to.nbytes
        return copy

    def to_ram(
        self, to: torch.Tensor, source: torch.Tensor, streams: Iterable[Stream] | None = None
    ) -> _Copy:
        check_sides(to, source)
        check_not_capturing(self.runtime)
        given = [self.current_stream()] if streams is None else streams
        with self._lock:
            after = [self.runtime.record(stream) for stream in given]
            copy = self._start(self._draining, to, source, after)
            self.d2h_bytes += to.nbytes
        return copy

    def offload_queue(self, buffers: HostArena) -> OffloadQueue:
        stream = self._draining.stream
        return self.runtime.offload_queue(stream, buffers)

    def offload(
        self,
        queue: OffloadQueue | None,
        to: torch.Tensor,
        source: torch.Tensor,
        add: bool,
        after: Event | None = None,
    ) -> OffloadOp:
        assert queue is not None
        assert to.is_contiguous()
        assert source.is_contiguous()
        assert to.numel() == source.numel(), (to.numel(), source.numel())
        with self._lock:
            self.d2h_bytes += source.nbytes
        names = DTYPE_NAMES[source.dtype], DTYPE_NAMES[to.dtype]
        event = 0 if after is None else self.runtime.handle(after)
        return queue.submit(
            source.data_ptr(), names[0], to.data_ptr(), names[1], to.numel(), add, event
        )

    def collective_device(self) -> str | None:
        return self.runtime.collective_name()

    def connect(self, group: Any, replicas: Any = None) -> DeviceStreams:
        """Streams for the collectives of process groups that runtime.process_group() has made."""
        with self._lock:
            copies = _Way("between RAM and the device", self.runtime.new_stream())
            self._ways.append(copies)
        return DeviceStreams(group, replicas, copies, self.runtime.new_stream())

    def unused_after(self, whole: torch.Tensor) -> list[Event]:
        """The events after which no work given so far uses `whole`, in slots of an arena."""
        with self._lock:
            arena, slot, run = self._arenas.find(whole)
            return arena.before_write(slot, run)

    def gather(
        self,
        streams: DeviceStreams,
        whole: torch.Tensor,
        own: torch.Tensor,
        source: torch.Tensor,
        computed: Event | None,
        unused: Sequence[Event],
        home: torch.Tensor | None = None,
    ) -> Event:
        """Starts gathering `whole` from the equal parts that the devices of a group have.

        Copies to it, and work with pinned views of its slots, then follow by themselves.

        Args:
            streams: the group's.
            whole: flat bytes, in slots of an arena.
            own: the place of this device's part in `whole`.
            source: what belongs there. The caller keeps it until the gather is done.
            computed: the event after which `source`, on this device, has its values; None: it is in
                RAM, and copied to its place first.
            unused: unused_after(), of when the gather was begun. A gather that waited for work that
                was given later could wait for itself, by way of what other devices wait for.
            home: memory in RAM for all of it, which gets what `source` is not.

        Returns the event at which it is done.
        """
        # (Without the lock where collectives are given: NCCL may connect hosts then, and the other
        # one may be in a collective of another group, for which this one's thread needs the lock.)
        with self._lock:
            arena, slot, run = self._arenas.find(whole)
            waits = list(unused)
            if computed is None:
                check_sides(own, source)
                # In a stream of copies, so that the next one's is made during this gather.
                waits.append(self._start(streams.copies, own, source, unused).event)
                self.h2d_bytes += own.nbytes
            else:
                own = source
                waits.append(computed)
            for event in waits:
                self.runtime.wait(streams.collectives, event)
        with self.runtime.on(streams.collectives):
            streams.group._allgather_base(whole, own).wait()
        with self._lock:
            done = self.runtime.record(streams.collectives)
            if home is not None:
                begin = own.data_ptr() - whole.data_ptr()
                for part in (slice(0, begin), slice(begin + len(own), len(whole))):
                    if part.start < part.stop:
                        # In the stream of the next one's copy to the same slots.
                        done = self._start(streams.copies, home[part], whole[part], [done]).event
                        self.d2h_bytes += part.stop - part.start
            arena.written(slot, run, done)
        return done

    def lead_threads(self) -> None:
        default, current = self.runtime.default_stream, self.current_stream()
        if current != default:  # (the one that other threads give their work to)
            self.runtime.wait(default, self.runtime.record(current))

    def average(self, streams: DeviceStreams, task: MeanTask, after: Sequence[Event]) -> Event:
        """Starts making the mean of this device's parts of what the devices of a group have.

        With replicas it becomes the mean of theirs. `after` are the events after which the task's
        `flat` is computed. Returns the event at which the mean is there.
        """
        with self._lock:
            arena, slot, run = self._arenas.find(task.received)
            stream, flat = streams.collectives, task.flat
            for event in [*after, *arena.before_write(slot, run)]:
                self.runtime.wait(stream, event)
        with self.runtime.on(stream):
            if streams.group is not None:
                self._average_in_group(streams.group, flat, task.received, task.mean)
            if streams.replicas is not None:
                assert task.between is not None
                mine = flat if streams.group is None else task.mean
                own = task.between.chunk(streams.replicas.size())[0]
                self._average_in_group(streams.replicas, mine, task.between, own)
                streams.replicas._allgather_base(_bytes(task.mean), _bytes(own)).wait()
        with self._lock:
            done = self.runtime.record(stream)
            if task.in_ram is not None:
                check_sides(task.in_ram, task.mean)
                done = self._start(self._draining, task.in_ram, task.mean, [done]).event
                self.d2h_bytes += task.mean.nbytes
            arena.written(slot, run, done)
        return done

    def _average_in_group(
        self, group: Any, flat: torch.Tensor, received: torch.Tensor, into: torch.Tensor
    ) -> None:
        """Makes the mean of this device's parts of `flat`, in the current stream."""
        group.alltoall_base(_bytes(received), _bytes(flat), [], []).wait()
        self.runtime.mean(received.view(group.size(), -1), into)

    def _start(
        self, way: _Way, to: torch.Tensor, source: torch.Tensor, events: Iterable[Event]
    ) -> _Copy:
        """Needs the lock."""
        for each in self._ways:
            each.forget_done()
        for event in events:
            self.runtime.wait(way.stream, event)
        self.runtime.copy(to, source, way.stream)
        copy = _Copy(self.runtime, self.runtime.record(way.stream), way.words, to, source)
        way.under_way.append(copy)
        return copy

    def updater(self, kind: UpdateKind, tile_numel: int) -> Updater:
        key = kind, tile_numel
        if key not in self._updaters:
            self._updaters[key] = Updater(self.runtime, kind, tile_numel)
        return self._updaters[key]

    def check_not_capturing(self) -> None:
        check_not_capturing(self.runtime)

    def synchronize(self) -> None:
        """Until the device has done all its work. Its next use raises the errors of that work."""
        with suppress(RuntimeError):
            self.runtime.synchronize_all()
        with self._lock:
            for way in self._ways:
                way.forget_done()

    def device_bytes(self) -> int:
        return self.runtime.memory()[1]

    def beside_bytes(self) -> int:
        """The most that was taken on the device beside our arenas, since reset_beside().

        These are other tensors (activations, gradients on their way, temporaries), memory that
        torch's allocator has reserved and no tensor uses, the context and libraries, and other
        processes.
        """
        _, taken, most = self.runtime.torch_bytes()
        free, total = self.runtime.memory()
        others = max(0, total - free - taken)  # context, libraries, other processes
        with self._lock:
            arenas = self._arenas.open
        return max(0, others + most - sum(arena.slots * arena.slot_bytes for arena in arenas))

    def reset_beside(self) -> None:
        self.runtime.reset_peak()

    def trim(self) -> None:
        self.runtime.empty_cache()

    def close(self) -> None:
        for way in self._ways:
            for copy in list(way.under_way):
                with suppress(OSError):
                    copy.wait()
            way.under_way.clear()
        if self._updaters:
            with suppress(RuntimeError):
                self.runtime.synchronize_all()  # until no kernel is running
        for updater in self._updaters.values():
            updater.close()
        self._updaters.clear()


class _Arenas:
    """The device's arenas, found by an address in them. For callers with the backend's lock."""

    def __init__(self) -> None:
        self._all: weakref.WeakSet[DeviceArena] = weakref.WeakSet()
        # Where they began when last looked at, in order.
        self._begins: list[tuple[int, weakref.ref[DeviceArena]]] = []

    def add(self, arena: DeviceArena) -> None:
        """One more."""
        self._all.add(arena)

    @property
    def open(self) -> list[DeviceArena]:
        """Those that have memory."""
        return [arena for arena in self._all if arena.is_open]

    def find(self, to: torch.Tensor) -> tuple[DeviceArena, int, int]:
        """The arena that has `to`, the first slot that it touches there, and how many it does."""
        address = to.data_ptr()
        for _ in range(2):
            index = bisect.bisect_right(self._begins, address, key=lambda entry: entry[0])
            arena = self._begins[index - 1][1]() if index else None
            slot = arena.slot_of(address) if arena is not None and arena.is_open else None
            if arena is not None and slot is not None:
                end = address + to.nbytes - arena.address(slot)
                return arena, slot, -(-end // arena.slot_bytes)
            begins = [(arena.address(0), weakref.ref(arena)) for arena in self.open]
            self._begins = sorted(begins, key=lambda entry: entry[0])
        raise AssertionError("a fetch goes to slots of an arena of this backend")


@dataclass
class _Way:
    """A direction of copies; those under way are in the stream's order."""

    words: str
    stream: Stream
    under_way: deque[_Copy] = field(default_factory=deque)

    def forget_done(self) -> None:
        """What is done needs its tensors no more. For callers with the backend's lock."""
        while self.under_way and self.under_way[0].done():
            self.under_way.popleft()


@dataclass(frozen=True, eq=False)
class DeviceStreams:
    """The streams of a group of devices: `copies` of what is gathered, and its `collectives`.

    Also those with the replicas of what this device has, in their order among the others. No other
    group's are in these streams. Such may come in another order on another device: two in one
    stream would wait for each other.
    """

    group: Any  # torch.distributed's; None: this device is the only one of the group
    replicas: Any  # likewise, of those that have the same parts
    copies: _Way
    collectives: Stream


@dataclass(frozen=True, eq=False)
class MeanTask:
    """A mean that the devices of a group of n make; all tensors are flat and of one dtype.

    The caller keeps `flat` and `in_ram` until it is there.

    Attributes:
        flat: what this device has, of n equal parts.
        received: as many elements in slots of an arena, for the parts that are sent to it.
        mean: where the mean of its parts comes to, on the device: the first part of `received`,
            say.
        between: as many elements as the mean, on the device, for what replicas send.
        in_ram: memory in RAM to which the mean is copied; None: it stays on the device.

    Several tasks may have the same `received` and `between`.
    """

    flat: torch.Tensor
    received: torch.Tensor
    mean: torch.Tensor
    between: torch.Tensor | None = None
    in_ram: torch.Tensor | None = None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


class _Copy:
    """A copy on the device's stream, and what it needs until it is done."""

    def __init__(
        self, runtime: CudaRuntime, event: Event, way: str, *tensors: torch.Tensor
    ) -> None:
        self.event = event
        self._runtime = runtime
        self._words = f"copy of {format_bytes(tensors[0].nbytes)} {way}"
        self._tensors = tensors

    def done(self) -> bool:
        """Whether it is done or has failed."""
        try:
            done = self._runtime.done(self.event)
        except RuntimeError:
            done = True
        if done:
            self._tensors = ()
        return done

    def wait(self) -> None:
        """The host sleeps until it is done. Raises an OSError if work on the device failed."""
        try:
            self._runtime.synchronize(self.event)
        except RuntimeError as error:
            raise OSError(errno.EIO, f"{self._words} failed: {error}") from error
        finally:
            self._tensors = ()

    def cancel(self) -> None:
        """Nothing: the device cannot be told to leave out a copy."""
