"""The directories that scratch files are made in."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path

from offload.errors import StoreError
from offload.memory.sizes import format_bytes

IN_RAM = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")  # types of filesystems whose files are RAM
_MOUNTINFO = Path("/proc/self/mountinfo")


def check_directory(path: str | os.PathLike[str], allow_ram_filesystem: bool = False) -> str:
    """`path` as text if scratch files can be made in it. Raises StoreError that says why not.

    Files of a RAM filesystem are taken only if that is allowed: they hold no less RAM than what
    goes there did, and no budget of RAM would count them.
    """
    directory = os.fspath(path)
    if not os.path.exists(directory):
        raise StoreError(
            errno.ENOENT,
            f"nvme_path does not exist; make it first (mkdir -p {directory})",
            directory,
        )
    if not os.path.isdir(directory):
        raise StoreError(errno.ENOTDIR, "nvme_path is not a directory", directory)
    kind = ram_filesystem(directory)
    if kind is not None and not allow_ram_filesystem:
        raise StoreError(
            errno.EINVAL,
            f"nvme_path is on a filesystem of type {kind}, whose files are RAM themselves, so what "
            f"goes there frees none; name a folder on an NVMe disk, or for trials count files "
            f"as RAM: debug={{'allow_ram_filesystem': True}} (--allow-ram-filesystem)",
            directory,
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        raise StoreError(errno.EACCES, "nvme_path is not writable for this user", directory)
    return directory


def check_directories(
    paths: Sequence[str | os.PathLike[str]], allow_ram_filesystem: bool = False
) -> tuple[str, ...]:
    """check_directory of each; StoreError also for one that is given twice, by whatever name."""
    directories = tuple(check_directory(path, allow_ram_filesystem) for path in paths)
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


def mounted_at(path: Path, mountinfo: Path = _MOUNTINFO) -> tuple[str, str]:
    """The type of the filesystem that has the absolute `path`, and what it is mounted from;
    "unknown" where the kernel does not say."""
    best, found = Path("/"), ("unknown", "unknown")
    try:
        lines = mountinfo.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        before, _, after = line.partition(" - ")  # proc(5): optional fields end there
        kind, source, *_ = after.split(" ")
        # Spaces and the like are written as \040.
        point = Path(re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), before.split(" ")[4]))
        # Of mounts over one another the last one is seen.
        if path.is_relative_to(point) and point.is_relative_to(best):
            best, found = point, (kind, source)
    return found


def ram_filesystem(directory: str | os.PathLike[str]) -> str | None:
    """The type of the filesystem of `directory` if its files are RAM; else None."""
    kind, _ = mounted_at(Path(directory).resolve())
    return kind if kind in IN_RAM else None


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
