"""What is durable: on the disk, and not only in the system's memory."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from offload.errors import StoreError


def sync_path(path: Path) -> None:
    """Returns when a file's content, or the names in a folder, are durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_named(descriptor: int, path: str | Path) -> None:
    """Raises StoreError unless `path` still names the open file, which would go with close()."""
    mine = os.fstat(descriptor)
    try:
        named = os.stat(path)
    except FileNotFoundError:
        named = None
    if named is None or (named.st_dev, named.st_ino) != (mine.st_dev, mine.st_ino):
        raise StoreError(
            errno.ENOENT, "the file was removed, or replaced, while it was in use", str(path)
        )
