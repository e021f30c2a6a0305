"""How tests wait for what another thread, another process or the kernel does in its own time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

# Longer than anything takes on the slowest machine under load, so that it tells a hang, no delay.
PATIENCE_S = 60.0
T = TypeVar("T")


def until(holds: Callable[[], object], what: str = "it never came") -> None:
    """Waits until holds() is true. Raises AssertionError with `what` after PATIENCE_S."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.001)


def in_time(look: Callable[[], T], wanted: T) -> T:
    """What `look` finds, after time for it to become `wanted`."""
    deadline_s = time.monotonic() + PATIENCE_S
    while (found := look()) != wanted and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return found
