"""Marks that torch's profiler shows: what of a step is hetero's, and which part of it.

    hetero::gather       a chunk's parameters are brought where compute uses them, or found there
    hetero::reduce       a chunk's gradients start on their way to the mean over the ranks
    hetero::wait_reduce  until the oldest of these means is there, and is kept
    hetero::update       step(), or backward, submits updates, and waits as far as it must
    hetero::wait_update  a use of a chunk waits for the update of it

Transfers and updates themselves run in native threads, which torch's profiler does not see; the
timeline (offload.timeline) does.

The blocks exist while a profiler is active: one alone takes 15 us without a profiler, the look for
one 0.1 us.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

from torch.autograd import profiler

P = ParamSpec("P")
R = TypeVar("R")

_NOTHING = nullcontext()


def mark(name: str) -> AbstractContextManager[object]:
    """A block that torch's profiler shows; without an active profiler it costs 0.1 us."""
    # (record_function alone takes some microseconds with no profiler, too.)
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NOTHING


def marked(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """mark() around each call of a function."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not profiler._is_profiler_enabled:
                return function(*args, **kwargs)
            with profiler.record_function(name):
                return function(*args, **kwargs)

        return call

    return decorate
