"""What is durable: on the disk, and not only in the system's memory."""

from __future__ import annotations

import errno
import os
import stat
import warnings
from pathlib import Path

from offload.errors import StoreError

# How filesystems say that folders have no fsync().
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)


def sync_path(path: Path) -> None:
    """Returns when a file's content, or the names in a folder, are durable. Raises OSError.

    Where the filesystem has no such call for folders, warns: their names are then as durable as
    that filesystem makes them.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
        warnings.warn(
            f"{path}: its filesystem cannot make the names in a folder durable "
            f"({error.strerror}), so after a power failure the newest files may be missing there",
            stacklevel=2,
        )
    finally:
        os.close(descriptor)


def write_all(descriptor: int, content: bytes | bytearray | memoryview, offset: int) -> None:
    """Writes all of it at byte `offset` of a file. Raises OSError."""
    left = memoryview(content)
    while left:
        done = os.pwrite(descriptor, left, offset)
        left, offset = left[done:], offset + done


def write_durably(path: Path, content: bytes) -> None:
    """Writes a file, and returns when its content is durable. Raises OSError."""
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


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
