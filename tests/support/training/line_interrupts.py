"""Ctrl-C at a chosen line of Python code, in whatever file it is."""

from __future__ import annotations

import linecache
import signal
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.autograd import grad_mode, profiler

from offload import interrupts

_WITHOUT_PLACES = (weakref.__file__, grad_mode.__file__, profiler.__file__)


class LineInterrupt:
    """Sends SIGINT to this process at place number `at` (from 1) of those that a call executes.

    A place is a line of Python code: hetero's, torch's, contextlib's. All lines of an uninterrupted
    function are one place, because the signal is delivered at its end, wherever it came. Three
    files have none: what callbacks of weak references raise Python ignores, torch's own grad mode
    stays off if no_grad() is interrupted at its end, and torch functions stay off if a profiler's
    range is, which a signal, unlike this, cannot do. For the same reason a line that switches torch
    functions off is none: the end of that block is one call of a function in C.
    """

    def __init__(self, at: int = 0) -> None:
        """`at=0` counts the places."""
        self._at = at
        self._was_held_back = False
        self.places = 0
        self.where = ""  # where the signal was sent

    def run(self, function: Callable[[], object]) -> None:
        """Calls the function; raises KeyboardInterrupt where, or later than, the signal came."""
        sys.settrace(self._trace)
        try:
            function()
        finally:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename in _WITHOUT_PLACES:
            return None
        if event == "line" and "DisableTorchFunction" not in _source(frame):
            held_back = interrupts._block.depth > 0
            self.places += not (held_back and self._was_held_back)
            self._was_held_back = held_back
            if self.places == self._at and not self.where:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
        return self._trace


def _source(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno)
