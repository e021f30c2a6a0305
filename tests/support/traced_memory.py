"""How much memory Python's own objects take."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def traced_memory() -> Iterator[Callable[[], tuple[int, int]]]:
    """Gives a function that returns what is held of the block's allocations, and their peak.

    Both in bytes. A block that raises ends it, too: a peak would count for the tests that follow.
    """
    tracemalloc.start()
    try:
        yield tracemalloc.get_traced_memory
    finally:
        tracemalloc.stop()
