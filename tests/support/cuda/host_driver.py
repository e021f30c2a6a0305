"""The functions of CUDA's driver that native code calls, over RAM: copies are made at once."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from offload._native import OffloadQueue

LAUNCH_FAILED = 719  # cudaErrorLaunchFailure's number


class HostDriver:
    """A device of which nobody hears that a copy is done while the gate is not set.

    Attributes:
        copies: how many were started.
        failing: the numbers of those that fail.
        gate: set at first.
    """

    def __init__(self) -> None:
        self.copies = 0
        self.failing: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self._events = 0
        self._copy_of: dict[int, int] = {}  # by event
        self._text = ctypes.create_string_buffer(b"launch failed")
        handle = c_void_p
        self._callbacks: dict[str, Callable[..., object]] = {
            "cuCtxSetCurrent": ctypes.CFUNCTYPE(c_int, handle)(lambda _: 0),
            "cuEventCreate": ctypes.CFUNCTYPE(c_int, POINTER(handle), c_uint)(self._create),
            "cuEventDestroy_v2": ctypes.CFUNCTYPE(c_int, handle)(lambda _: 0),
            "cuEventRecord": ctypes.CFUNCTYPE(c_int, handle, handle)(self._record),
            "cuEventSynchronize": ctypes.CFUNCTYPE(c_int, handle)(self._synchronize),
            "cuStreamWaitEvent": ctypes.CFUNCTYPE(c_int, handle, handle, c_uint)(lambda *_: 0),
            "cuMemcpyDtoHAsync_v2": ctypes.CFUNCTYPE(c_int, handle, c_uint64, c_size_t, handle)(
                self._copy
            ),
            "cuGetErrorString": ctypes.CFUNCTYPE(c_int, c_int, POINTER(c_char_p))(self._words),
        }

    def queue(self, buffers: int, count: int, buffer_bytes: int) -> OffloadQueue:
        """A queue from this device, which must outlive it."""
        functions = {n: ctypes.cast(f, c_void_p).value or 0 for n, f in self._callbacks.items()}
        return OffloadQueue(functions, 1, 1, buffers, count, buffer_bytes)

    def _create(self, event: Any, flags: int) -> int:
        self._events += 1
        event[0] = self._events
        return 0

    def _copy(self, to: int, source: int, nbytes: int, stream: int) -> int:
        self.copies += 1
        ctypes.memmove(to, source, nbytes)
        return 0

    def _record(self, event: int, stream: int) -> int:
        self._copy_of[event] = self.copies - 1
        return 0

    def _synchronize(self, event: int) -> int:
        self.gate.wait()
        return LAUNCH_FAILED if self._copy_of[event] in self.failing else 0

    def _words(self, error: int, text: Any) -> int:
        text[0] = ctypes.cast(self._text, c_char_p)
        return 0
