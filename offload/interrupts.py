"""Ctrl-C, and whatever else signals raise, waits until a change of state is whole.

Python runs signal handlers in the main thread, between any two instructions, and Ctrl-C's raises
KeyboardInterrupt there: a chunk may have its slot by then and no entry in the table of slots. No
code can be written, or read, that is right at each of these places. So every function that user
code or torch enters this package by is `uninterrupted`: a signal that comes meanwhile is delivered
when the function is done. A forward or backward of a model is many such functions, so that it ends
at once; optimizer.step() is one, which ends when the step is made.

A second Ctrl-C is not held back, because the first one may be waiting for something that hangs. It
leaves the state as it is, half changed, and Damage says so from then on.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal.signal() makes enums: ten times slower
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from types import FrameType, TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

from offload.errors import HeteroError

P = ParamSpec("P")
R = TypeVar("R")

# Those whose handlers raise, in programs: Ctrl-C, the ends of jobs and of terminals, timeouts.
_SIGNALS = tuple(
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
)


class _Uninterrupted(AbstractContextManager[None]):
    """A block at whose end signals are delivered that came inside; blocks may be nested.

    Handlers that are Python functions are replaced while the outermost block runs, so that a
    program, or a notebook for each of its cells, may install its own at any other time.
    """

    def __init__(self) -> None:
        self.depth = 0  # of the main thread's blocks
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._waiting: dict[int, None] = {}  # in the order in which they came
        self.damages = 0  # blocks that something has ended in the middle
        self.damaged = ""  # the function that the last one was

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        if not self.depth:
            for number in _SIGNALS:
                handler = _signal.getsignal(number)
                if callable(handler) and handler != self._hold_back:
                    self._handlers[number] = handler
                    _signal.signal(number, self._hold_back)
        self.depth += 1  # last: until then a signal that comes is delivered at once

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None and not issubclass(kind, Exception):
            inner = None if traceback is None else traceback.tb_next
            self.damaged = "" if inner is None else inner.tb_frame.f_code.co_name
            self.damages += 1
        if threading.get_ident() != threading.main_thread().ident:
            return
        self.depth -= 1  # first: from here on a signal that comes is delivered at once
        if not self.depth:
            for number, handler in self._handlers.items():
                if _signal.getsignal(number) == self._hold_back:
                    _signal.signal(number, handler)
            if self._waiting:
                self.deliver()

    def _hold_back(self, number: int, frame: FrameType | None) -> None:
        if self.depth and number not in self._waiting:
            self._waiting[number] = None
        else:
            self._handlers[number](number, frame)

    def deliver(self) -> None:
        """Calls the handlers of the signals that were held back, which may raise."""
        while self._waiting:
            number = next(iter(self._waiting))
            del self._waiting[number]
            self._handlers[number](number, sys._getframe(1))


_block = _Uninterrupted()


def uninterrupted(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function by which user code or torch enters: signals wait until it is done."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _block.depth and threading.get_ident() == threading.main_thread().ident:
            return function(*args, **kwargs)  # inside of another one, which takes care of it
        with _block:
            return function(*args, **kwargs)

    return call


class Uninterrupted(AbstractContextManager[R], Generic[R]):
    """A context manager whose beginning and end are uninterrupted, and whose block is not.

    What it has begun is ended, whatever a signal raises.
    """

    def __init__(self, context: AbstractContextManager[R]) -> None:
        self._context = context
        self._entered = False

    def __enter__(self) -> R:
        try:
            with _block:
                entered = self._context.__enter__()
                self._entered = True
                return entered
        except BaseException:
            if self._entered:
                with _block:
                    self._context.__exit__(*sys.exc_info())
            raise

    @uninterrupted
    def __exit__(self, *error: Any) -> bool | None:
        return self._context.__exit__(*error)


def deliver_signals() -> None:
    """Ends a wait inside of what is uninterrupted, for what may never come: another process.

    Raises what the handlers of signals raise that were held back. What was to be done is damaged.
    """
    if threading.get_ident() == threading.main_thread().ident:
        _block.deliver()


class Damage:
    """Whether, since this was made, an uninterrupted function was ended in the middle after all."""

    def __init__(self) -> None:
        self._before = _block.damages

    def check(self) -> None:
        """Raises HeteroError if one was: nobody knows what it has changed, and what not."""
        if _block.damages != self._before:
            raise HeteroError(
                f"this program was interrupted in the middle of {_block.damaged or 'a change'}() "
                f"of hetero, so values of parameters, gradients or optimizer states may be half "
                f"changed; build the model again and load the last checkpoint"
            )
