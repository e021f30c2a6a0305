"""What the stack of Python calls tells: which module runs, and which calls were interrupted."""

from __future__ import annotations

import sys
import threading
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import FrameType
from typing import NamedTuple

import torch
import torch.nn.modules.module as modules
import torch.utils.checkpoint as checkpoint_module


def _callers(frame: FrameType | None = None) -> list[FrameType]:
    """The frames of the calls that are running in this thread, innermost first, or from `frame` on.

    A frame must not be kept in a variable of its own: that cycle would keep all locals of all
    callers, activations among them, until the garbage collector comes.
    """
    frame = frame or sys._getframe(1)
    found: list[FrameType] = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def module_frame(*functions: str) -> FrameType:
    """The innermost frame of torch.nn.Module's own code, to be called from within a hook.

    Of `functions` by name, if there is one of them; else of any.
    """
    innermost: FrameType | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == modules.__file__:
            if not functions or frame.f_code.co_name in functions:
                return frame
            innermost = innermost or frame
        frame = frame.f_back
    assert innermost is not None
    return innermost


def inside_another_backward() -> bool:
    """Whether the backward that runs was called by a node of another one.

    Such a node may have taken values out of what it saved, which no version protects any more. A
    reentrant checkpoint does not count: it has none of parameters. In a thread that autograd has
    started, as for a device, the outermost call has no frame.
    """
    depth = int(isinstance(threading.current_thread(), threading._DummyThread))
    for frame in _callers():
        code = frame.f_code
        if code.co_filename == torch.autograd.__file__:
            depth += code.co_name in ("backward", "grad")
        elif code.co_filename == checkpoint_module.__file__:
            depth -= code.co_name == "backward"
    return depth > 1


class FramePlace(NamedTuple):
    """What tells a frame from others without keeping it: a later one may have the same address, but
    hardly the same code and as many callers as well."""

    address: int
    code: int  # the address of its code object
    depth: int  # how many calls it is in, and itself

    @classmethod
    def of(cls, frame: FrameType) -> FramePlace:
        """Of a frame of this thread."""
        return cls(id(frame), id(frame.f_code), len(_callers(frame)))

    def is_running(self) -> bool:
        """Whether the frame is that of a call which is running in this thread."""
        callers = _callers(sys._getframe(1))
        if not 0 < self.depth <= len(callers):
            return False
        frame = callers[-self.depth]
        return self.address == id(frame) and self.code == id(frame.f_code)


@dataclass
class EnteredCall:
    """A call of a module that has begun.

    `present` is what any thread may end, `modes` what only the thread of the call can: torch's
    modes and saved-tensor hooks are a thread's own. `frame` is the call's frame: if that is not on
    the thread's stack any more, the call was interrupted. Neither the frame nor the module is kept
    alive, so that a model that is dropped after an interruption goes.
    """

    module: weakref.ref[torch.nn.Module]
    frame: FramePlace
    present: ExitStack = field(default_factory=ExitStack)
    modes: ExitStack = field(default_factory=ExitStack)
    is_outermost: bool = True

    def close(self) -> None:
        """Ends what the call has entered; all of it, also if a part raises."""
        try:
            self.modes.close()
        finally:
            self.present.close()


class EnteredCalls:
    """The calls that have begun and not ended, of each thread its own, innermost last."""

    def __init__(self) -> None:
        self._of_thread: dict[threading.Thread, list[EnteredCall]] = {}

    @property
    def own(self) -> list[EnteredCall]:
        """Those of this thread."""
        return self._of_thread.get(threading.current_thread(), [])

    @property
    def threads(self) -> int:
        """How many threads have entered calls."""
        return len(self._of_thread)

    def enter(self, module: torch.nn.Module, frame: FrameType) -> EnteredCall:
        """Notes that this thread's call of `module` begins; then enter its contexts."""
        place = FramePlace.of(frame)
        self.unwind(place)
        own = self._of_thread.setdefault(threading.current_thread(), [])
        call = EnteredCall(weakref.ref(module), place)
        if own:
            call.is_outermost = False
        own.append(call)
        return call

    def leave(self, module: torch.nn.Module) -> bool:
        """Closes this thread's last call if it is one of `module`; returns whether none is left.

        (After an exception torch calls forward hooks from the inside out; the last call is another
        one only if the hook that enters was not reached.)
        """
        own = self.own
        if own and own[-1].module() is module:
            self._pop(own).close()
        return not own

    def unwind(self, beginning: FramePlace | None = None) -> None:
        """Closes calls that were interrupted: torch calls no hook for what is not an Exception.

        `beginning` is the place of a call that is not entered yet: one that was interrupted may
        have had its frame there.
        """
        own = self.own
        while own and (own[-1].frame == beginning or not own[-1].frame.is_running()):
            self._pop(own).close()
        if len(self._of_thread) == (1 if own else 0):
            return  # no other thread has entered calls
        for thread in [t for t in list(self._of_thread) if not t.is_alive()]:
            calls = self._of_thread.pop(thread, [])
            while calls:
                calls.pop().present.close()

    def _pop(self, own: list[EnteredCall]) -> EnteredCall:
        call = own.pop()
        if not own:
            del self._of_thread[threading.current_thread()]
        return call
