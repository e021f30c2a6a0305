"""The directories that scratch files are made in."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from offload.errors import StoreError
from offload.memory.sizes import format_bytes


def check_directory(path: str | os.PathLike[str]) -> str:
    """`path` as text if scratch files can be made in it. Raises StoreError that says why not."""
    directory = os.fspath(path)
    if not os.path.exists(directory):
        raise StoreError(
            errno.ENOENT,
            f"nvme_path does not exist; make it first (mkdir -p {directory})",
            directory,
        )
    if not os.path.isdir(directory):
        raise StoreError(errno.ENOTDIR, "nvme_path is not a directory", directory)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise StoreError(errno.EACCES, "nvme_path is not writable for this user", directory)
    return directory


def check_directories(paths: Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """check_directory of each; StoreError also for one that is given twice, by whatever name."""
    directories = tuple(check_directory(path) for path in paths)
    if not directories:
        raise StoreError(errno.EINVAL, "nvme_path names no directory", "")
    seen: dict[tuple[int, int], str] = {}
    for directory in directories:
        stat = os.stat(directory)
        place = (stat.st_dev, stat.st_ino)
        if place in seen:
            raise StoreError(
                errno.EINVAL,
                f"nvme_path names one directory twice (also as {seen[place]}); name each disk once",
                directory,
            )
        seen[place] = directory
    return directories


def filesystem_of(directory: str) -> int:
    """A number that directories on one filesystem share."""
    return os.stat(directory).st_dev


def free_bytes(directory: str) -> int:
    """Bytes an unprivileged user may still write to the filesystem of `directory`."""
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize


def format_free(directory: str) -> str:
    """free_bytes in words, for the message of an error, which it must not replace by another."""
    try:
        return format_bytes(free_bytes(directory))
    except OSError:
        return "an unknown number of bytes"


def total_free_bytes(directories: Sequence[str]) -> int:
    """Free bytes of all `directories`; a filesystem that several of them share counts once."""
    return sum({filesystem_of(d): free_bytes(d) for d in directories}.values())
