"""Descriptors that this process has open, and its threads of native code."""

import contextlib
import os
from pathlib import Path


def descriptors(*words: str) -> set[tuple[int, str]]:
    """Numbers and targets of those that are open; with words, of targets that have one of them."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            target = os.readlink(f"/proc/self/fd/{fd}")
            if not words or any(word in target for word in words):
                found.add((int(fd), target))
    return found


def native_threads(*names: str) -> set[tuple[int, str]]:
    """Ids and names of this project's threads that are alive; with names, of those that begin so.

    The kernel lists a thread, and what it has open, for a moment after it was joined: in_time()
    gives it the time.
    """
    found = set()
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            name = path.read_text().strip()
            if name.startswith(names or "hetero"):
                found.add((int(path.parent.name), name))
    return found
