"""What native code calls of CUDA's driver, over a fake device."""

from __future__ import annotations

import ctypes
import threading
import traceback
import weakref
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.native.fake_cuda import FakeRuntime, Recording

CONTEXT = 4711  # the handle of the device's context


class FakeEvent:
    """What the device has for an event: the moment that it was recorded at last."""

    def __init__(self) -> None:
        self.last: Recording | None = None


class FakeDriver:
    """The functions of CUDA's driver that native code calls for its copies."""

    FAILED = 719  # cudaErrorLaunchFailure's number

    def __init__(self, runtime: FakeRuntime) -> None:
        self._runtime = weakref.ref(runtime)
        self._handles: dict[int, tuple[Any, ...]] = {}  # what each stands for
        self._text = ctypes.create_string_buffer(b"", 200)
        self.events = 0  # that were made and not destroyed
        self.refused: str | None = None  # the function that fails and does nothing
        # By thread. (What is local to a thread of Python's ends with each call from native code.)
        self._current: dict[int, int] = {}
        handle, number = c_void_p, c_uint
        self._callbacks = {
            name: ctypes.CFUNCTYPE(c_int, *arguments)(partial(self._call, name))
            for name, *arguments in (
                ("cuCtxSetCurrent", handle),
                ("cuEventCreate", POINTER(handle), number),
                ("cuEventDestroy_v2", handle),
                ("cuEventRecord", handle, handle),
                ("cuEventSynchronize", handle),
                ("cuStreamWaitEvent", handle, handle, number),
                ("cuMemcpyDtoHAsync_v2", handle, c_uint64, c_size_t, handle),
                ("cuGetErrorString", c_int, POINTER(c_char_p)),
            )
        }
        self.functions = {
            n: ctypes.cast(f, c_void_p).value or 0 for n, f in self._callbacks.items()
        }

    def _call(self, name: str, *arguments: Any) -> int:
        if name == self.refused:
            return self.FAILED
        try:
            return int(getattr(self, name)(*arguments))
        except AssertionError:  # native code hears of it, and with it who waits for the copy
            traceback.print_exc()
            return self.FAILED

    @property
    def runtime(self) -> FakeRuntime:
        found = self._runtime()
        assert found is not None
        return found

    def handle(self, *thing: Any) -> int:
        """A number that stands for `thing` from now on; no other one was ever the same."""
        self._handles[len(self._handles) + 1] = thing
        return len(self._handles)

    def _in_context(self) -> None:
        assert self._current.get(threading.get_native_id()) == CONTEXT, "the thread has no context"

    def cuCtxSetCurrent(self, context: int) -> int:
        self._current[threading.get_native_id()] = context
        return 0

    def cuEventCreate(self, event: Any, flags: int) -> int:
        self._in_context()
        assert flags == 3  # who waits sleeps; without a time
        event[0] = self.handle(None, FakeEvent())
        self.events += 1
        return 0

    def cuEventDestroy_v2(self, event: int) -> int:
        self._in_context()
        self.events -= 1
        return 0

    def cuEventRecord(self, event: int, stream: int) -> int:
        self._in_context()
        (queue,), (_, raw) = self._handles[stream], self._handles[event]
        raw.last = self.runtime.recording(queue)
        return 0

    def cuEventSynchronize(self, event: int) -> int:
        recording, raw = self._handles[event]
        assert recording in (None, raw.last), "an event was recorded anew that somebody waits for"
        return self.FAILED if not self.runtime.reach(raw.last) else 0

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> int:
        self._in_context()
        (queue,), (recording, raw) = self._handles[stream], self._handles[event]
        assert recording in (None, raw.last), "an event was recorded anew that somebody waits for"
        self.runtime.wait_for(queue, raw.last)
        return 0

    def cuMemcpyDtoHAsync_v2(self, to: int, source: int, nbytes: int, stream: int) -> int:
        self._in_context()
        (queue,) = self._handles[stream]
        self.runtime.copy_bytes(to, source, nbytes, queue)
        return 0

    def cuGetErrorString(self, error: int, text: Any) -> int:
        self._text.value = (self.runtime.failure or "").encode()
        text[0] = ctypes.cast(self._text, c_char_p)
        return 0
