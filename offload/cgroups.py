"""The control groups of this process, of version 1 or 2, and the CPUs that they leave it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def folders(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yields the folder of the process's group that has a controller, and those of all above it.

    `root` is put before /proc and /sys.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        # Version 2 is hierarchy 0 and names no controllers.
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / controllers
        # In a container the path may be of the host's tree; its own is then at the root.
        folder = base / path.lstrip("/")
        for each in (folder, *folder.parents):
            yield each
            if each == base:
                break


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The CPU time, in CPUs, that the quotas of the process's groups allow; None without one."""
    quotas = (_quota(folder) for folder in folders("cpu", root))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(folder: Path) -> float | None:
    """Version 2 has quota and period in one file, version 1 in two."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            words = [word for name in names for word in (folder / name).read_text().split()]
            quota, period = map(int, words)
        except (OSError, ValueError):  # ("max" is none)
            continue
        if quota > 0 and period > 0:
            return quota / period
    return None


def usable_cpus() -> int:
    """The CPUs that this process may run on, and no more than its quota pays for; at least 1.

    Threads that work together and share a quota that is too small are stopped by turns, and wait
    for each other.
    """
    cpus, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return cpus if quota is None else max(1, int(min(cpus, quota)))
