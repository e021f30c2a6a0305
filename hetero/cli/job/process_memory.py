"""What the operating system says this process holds."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil


def rss_bytes() -> int:
    """Resident memory now."""
    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes() -> int:
    """The most resident memory this program ever had.

    Linux keeps ru_maxrss across exec, so a small program started by a big one would report the
    big one's memory; VmHWM is this program's own.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
