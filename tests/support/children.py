"""Children of this process that do nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def child_that_waits() -> Iterator[None]:
    """A forked child, which lives until the end of the block."""
    ready, tell_ready = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(tell_ready, b"x")
            signal.pause()
        finally:
            os._exit(0)
    try:
        os.read(ready, 1)
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(tell_ready)
