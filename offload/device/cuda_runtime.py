"""The few functions of CUDA that the backend uses. Tests put others in their place.

A *stream* is a sequence of work that the device does in order; an *event* is a point in a stream,
which comes when all work before it is done. Only synchronize() and synchronize_all() make the host
wait.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch

from offload._native import OffloadQueue, UpdateKind
from offload.device.cuda_module import (
    COPY_FUNCTIONS,
    CudaModule,
    create_stream,
    driver_functions,
    pci_device,
    primary_context,
)
from offload.device.nccl import has_nccl, nccl_group
from offload.memory.arena import HostArena

Stream = Any
Event = Any  # torch's, recorded once: streams and hosts wait for that point alone
# By device, the handles of streams that nobody has any more.
_UNUSED_STREAMS: defaultdict[int, deque[int]] = defaultdict(deque)
_POLL_S = 0.0005  # CUDA knows no wait for an event with a limit
_MEAN_NUMEL = 4 << 20  # elements whose sum is in memory at once, in fp32


def choose_gpu() -> None:
    """Makes LOCAL_RANK's GPU the current one, in a rank that torchrun has started.

    Only where the first GPU is current, as at a program's start: what a program has chosen stays.
    """
    place = os.environ.get("LOCAL_RANK")
    if place is not None and torch.cuda.current_device() == 0:
        torch.cuda.set_device(int(place) % torch.cuda.device_count())


def mean_of_rows(parts: torch.Tensor, target: torch.Tensor) -> None:
    """Gives the current stream the mean of the rows of `parts`, in the bits of _native.mean().

    `target`, flat and of the same dtype, may be the first row. Takes 16 MiB at most meanwhile.
    """
    # By a number torch would multiply by the inverse.
    divisor = torch.full((1,), float(len(parts)), dtype=torch.float32, device=parts.device)
    pieces = zip(parts.split(_MEAN_NUMEL, 1), target.split(_MEAN_NUMEL), strict=True)
    for rows, into in pieces:
        total = rows[0].to(torch.float32, copy=True)
        for row in rows[1:]:
            total += row
        into.copy_(total.div_(divisor))


class CudaRuntime:
    """torch.cuda's current device. Any thread may use it."""

    mean = staticmethod(mean_of_rows)

    def __init__(self, kind: str = "cuda") -> None:
        """`kind` is of the device's type; tests have another one."""
        self._torch: Any = torch.get_device_module(kind)
        self._torch.init()
        choose_gpu()
        self._index = self._torch.current_device()
        self.device = torch.device(kind, self._index)
        self.dlpack_device = (2, self._index)  # kDLCUDA
        # Current in every new thread.
        self.default_stream: Stream = self._torch.default_stream(self.device)
        # Inside on(stream) it is the calling thread's current one.
        self.on: Callable[[Stream], AbstractContextManager[object]] = self._torch.stream
        self._streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()

    def new_stream(self) -> Stream:
        """A stream of its own, as long as somebody has it.

        torch's streams are 32 that it deals out in turns: the 33rd would be the first again, and
        what must not wait for each other would, on several ranks in a circle.
        """
        unused = _UNUSED_STREAMS[self._index]
        try:
            handle = unused.popleft()
        except IndexError:
            handle = create_stream(self._index)
        stream = torch.cuda.ExternalStream(handle, self.device)
        # It is dealt out again and never destroyed: torch's allocators may remember it.
        weakref.finalize(stream, unused.append, handle).atexit = False
        self._streams[handle] = stream
        return stream

    @property
    def streams(self) -> list[Stream]:
        """Streams of new_stream() that somebody has; other threads may make more meanwhile."""
        # (A copy of the references at once: who goes through a weak set must keep others from it.)
        found = (reference() for reference in self._streams.valuerefs())
        return [stream for stream in found if stream is not None]

    def current_stream(self) -> Stream:
        """The stream that gets the calling thread's work."""
        return self._torch.current_stream(self.device)

    def capturing(self) -> bool:
        """Whether what this thread gives the current stream is captured in a CUDA graph."""
        return bool(self._torch.is_current_stream_capturing())

    def record(self, stream: Stream) -> Event:
        """An event that comes when all work that `stream` was given so far is done."""
        event = self._torch.Event(blocking=True)  # who waits sleeps
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """What `stream` is given from now on is done after `event`; the host goes on."""
        stream.wait_event(event)

    def done(self, event: Event) -> bool:
        """Whether the event has come. Raises RuntimeError if work on the device failed."""
        return bool(event.query())

    def comes_within(self, event: Event, seconds: float) -> bool:
        """Whether `event` comes; the host waits so long at most. Raises RuntimeError as done()."""
        until_s = time.monotonic() + seconds
        while not self.done(event):
            if time.monotonic() > until_s:
                return False
            time.sleep(_POLL_S)
        return True

    def synchronize(self, event: Event) -> None:
        """The host sleeps until `event`. Raises RuntimeError as done()."""
        event.synchronize()

    def synchronize_all(self) -> None:
        """The host waits for all work on the device. Raises RuntimeError as done()."""
        self._torch.synchronize(self.device)

    def copy(self, to: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Gives `stream` a copy between RAM and the device, of flat tensors of one dtype."""
        with torch.no_grad(), self.on(stream):
            to.copy_(source, non_blocking=True)

    def handle(self, event: Event) -> int:
        """The driver's handle of an event, for as long as the caller has the event."""
        return int(event.cuda_event)

    def offload_queue(self, stream: Stream, buffers: HostArena) -> OffloadQueue:
        """A queue whose copies are in `stream`; the rest is as OffloadQueue has it."""
        context = primary_context(self._index)
        functions = driver_functions(COPY_FUNCTIONS)
        sizes = buffers.address(0), buffers.slots, buffers.slot_bytes
        return OffloadQueue(functions, context, stream.cuda_stream, *sizes)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Memory of the device. Raises RuntimeError (torch.cuda.OutOfMemoryError)."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def upload(self, content: bytes) -> torch.Tensor:
        """`content` on the device, for what the current stream is given from now on."""
        # Torch keeps the page-locked memory until the copy is done, and the host need not wait.
        ram = torch.frombuffer(bytearray(content), dtype=torch.uint8).pin_memory()
        return ram.to(self.device, non_blocking=True)

    def collective_name(self) -> str | None:
        """The device's name, which no other device of this machine has; None if it cannot have a
        process_group()."""
        return pci_device(self._index) if has_nccl() else None

    def process_group(self, store: Any, rank: int, size: int) -> Any:
        """torch.distributed's group of the devices of `size` ranks; all of them call this.

        Its collectives begin when the current stream has done what it has; that of the work's
        wait(), and not the host, then waits for their end. Raises RuntimeError.
        """
        return nccl_group(store, rank, size, self.device)

    def register(self, address: int, nbytes: int) -> str | None:
        """Page-locks RAM, so that copies go on in the background.

        Returns the reason if that cannot be done."""
        cudart: Any = torch.cuda.cudart()
        with torch.cuda.device(self._index):  # a new thread's would be device 0
            # Portable: every context may use it.
            result = cudart.cudaHostRegister(address, nbytes, 1)
        if int(result) == 0:
            return None
        # CUDA remembers its last error, and torch would take it for that of its next kernel.
        with suppress(RuntimeError):
            torch.zeros(1, device=self.device)
        words = f"error {int(result)}"
        with suppress(Exception):  # not every torch has it
            words = f"{cudart.cudaGetErrorString(result)} ({words})"
        return words

    def unregister(self, address: int) -> None:
        """Undoes register()."""
        cudart: Any = torch.cuda.cudart()
        with torch.cuda.device(self._index):
            cudart.cudaHostUnregister(address)

    def memory(self) -> tuple[int, int]:
        """(free, all) bytes of the device."""
        free, total = self._torch.mem_get_info(self.device)
        return int(free), int(total)

    def torch_bytes(self) -> tuple[int, int, int]:
        """Torch's: (in use by tensors, taken from CUDA, the most taken since reset_peak())."""
        return (
            self._torch.memory_allocated(self.device),
            self._torch.memory_reserved(self.device),
            self._torch.max_memory_reserved(self.device),
        )

    def reset_peak(self) -> None:
        """Restarts the peak that torch_bytes() returns."""
        self._torch.reset_peak_memory_stats(self.device)

    def empty_cache(self) -> None:
        """Gives memory back to CUDA that torch has reserved and no tensor uses."""
        self._torch.empty_cache()

    def kernels(self, kind: UpdateKind) -> CudaModule:
        """The kernels of one kind of update. Raises HeteroError if they cannot be compiled."""
        return CudaModule(kind, self._index)
