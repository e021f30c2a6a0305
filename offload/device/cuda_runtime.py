"""The few functions of CUDA that the backend uses. Tests put others in their place.

A *stream* is a sequence of work that the device does in order; an *event* is a point in a stream,
which comes when all work before it is done. Only synchronize() and synchronize_all() make the host
wait.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch

from offload._native import UpdateKind
from offload.device.cuda_module import CudaModule, Kernels

Stream = Any
Event = Any


class Runtime(Protocol):
    """One device. Any thread may use it."""

    device: torch.device
    dlpack_device: tuple[int, int]  # DLPack's type and number

    def new_stream(self) -> Stream:
        """A new stream."""

    def current_stream(self) -> Stream:
        """The stream that gets the calling thread's work."""

    def capturing(self) -> bool:
        """Whether what this thread gives the current stream is captured in a CUDA graph."""

    def record(self, stream: Stream) -> Event:
        """An event that comes when all work that `stream` was given so far is done."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What `stream` is given from now on is done after `event`; the host goes on."""

    def done(self, event: Event) -> bool:
        """Whether the event has come. Raises RuntimeError if work on the device failed."""

    def synchronize(self, event: Event) -> None:
        """The host sleeps until `event`. Raises RuntimeError as done()."""

    def synchronize_all(self) -> None:
        """The host waits for all work on the device. Raises RuntimeError as done()."""

    def copy(self, to: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Gives `stream` a copy between RAM and the device, of flat tensors of one dtype."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Memory of the device. Raises RuntimeError (torch.cuda.OutOfMemoryError)."""

    def register(self, address: int, nbytes: int) -> str | None:
        """Page-locks RAM, so that copies go on in the background.

        Returns the reason if that cannot be done."""

    def unregister(self, address: int) -> None:
        """Undoes register()."""

    def memory(self) -> tuple[int, int]:
        """(free, all) bytes of the device."""

    def torch_bytes(self) -> tuple[int, int, int]:
        """Torch's: (in use by tensors, taken from CUDA, the most taken since reset_peak())."""

    def reset_peak(self) -> None:
        """Restarts the peak that torch_bytes() returns."""

    def empty_cache(self) -> None:
        """Gives memory back to CUDA that torch has reserved and no tensor uses."""

    def kernels(self, kind: UpdateKind) -> Kernels:
        """The kernels of one kind of update. Raises HeteroError if they cannot be compiled."""


class CudaRuntime:
    """torch.cuda's current device."""

    def __init__(self) -> None:
        torch.cuda.init()
        self._index = torch.cuda.current_device()
        self.device = torch.device("cuda", self._index)
        self.dlpack_device = (2, self._index)  # kDLCUDA

    def new_stream(self) -> Stream:
        """As Runtime."""
        return torch.cuda.Stream(self.device)

    def current_stream(self) -> Stream:
        """As Runtime."""
        return torch.cuda.current_stream(self.device)

    def capturing(self) -> bool:
        """As Runtime."""
        return bool(torch.cuda.is_current_stream_capturing())

    def record(self, stream: Stream) -> Event:
        """As Runtime."""
        event = torch.cuda.Event(blocking=True)  # who waits sleeps
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """As Runtime."""
        stream.wait_event(event)

    def done(self, event: Event) -> bool:
        """As Runtime."""
        return bool(event.query())

    def synchronize(self, event: Event) -> None:
        """As Runtime."""
        event.synchronize()

    def synchronize_all(self) -> None:
        """As Runtime."""
        torch.cuda.synchronize(self.device)

    def copy(self, to: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """As Runtime."""
        with torch.no_grad(), torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)

    def empty(self, nbytes: int) -> torch.Tensor:
        """As Runtime."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def register(self, address: int, nbytes: int) -> str | None:
        """As Runtime."""
        # Portable (1): every context may use it.
        failure = _failure(lambda cudart: cudart.cudaHostRegister(address, nbytes, 1))
        if failure is not None:
            # CUDA remembers its last error, and torch would take it for that of its next kernel.
            with suppress(RuntimeError):
                torch.zeros(1, device=self.device)
        return failure

    def unregister(self, address: int) -> None:
        """As Runtime."""
        _failure(lambda cudart: cudart.cudaHostUnregister(address))

    def memory(self) -> tuple[int, int]:
        """As Runtime."""
        free, total = torch.cuda.mem_get_info(self.device)
        return int(free), int(total)

    def torch_bytes(self) -> tuple[int, int, int]:
        """As Runtime."""
        return (
            torch.cuda.memory_allocated(self.device),
            torch.cuda.memory_reserved(self.device),
            torch.cuda.max_memory_reserved(self.device),
        )

    def reset_peak(self) -> None:
        """As Runtime."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def empty_cache(self) -> None:
        """As Runtime."""
        torch.cuda.empty_cache()

    def kernels(self, kind: UpdateKind) -> Kernels:
        """As Runtime."""
        return CudaModule(kind, self._index)


def _failure(call: Callable[[Any], Any]) -> str | None:
    """What a function of CUDA's runtime says, if it failed."""
    cudart: Any = torch.cuda.cudart()
    result = call(cudart)
    if int(result) == 0:
        return None
    words = f"error {int(result)}"
    with suppress(Exception):  # not every torch has it
        words = f"{cudart.cudaGetErrorString(result)} ({words})"
    return words
