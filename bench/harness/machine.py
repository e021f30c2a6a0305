"""What a figure was measured on: the header of every table and of every JSON object."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import torch

from offload import _native
from offload.memory.sizes import format_bytes

ROOT = Path(__file__).resolve().parents[2]


def describe_machine() -> dict[str, Any]:
    """Date (UTC), CPU model, usable cores, instruction set in use, RAM in bytes, kernel, versions.

    `commit` is the one of this tree, with "+" when tracked files differ from it, and None where it
    is not known.
    """
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_model(Path("/proc/cpuinfo")),
        "cores": len(os.sched_getaffinity(0)),
        "isa": _native.isa(),
        "ram_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(ROOT),
    }


def header(machine: Mapping[str, Any], command: str) -> str:
    """The two lines above a table."""
    return (
        f"{machine['date']}  {machine['cpu']}, {machine['cores']} cores, {machine['isa']},"
        f" {format_bytes(machine['ram_bytes'])}, Linux {machine['kernel']},"
        f" torch {machine['torch']}, commit {machine['commit'] or 'unknown'}\n{command}"
    )


def cpu_model(cpuinfo: Path) -> str:
    """The model as the kernel names it, else the architecture (ARM kernels give no name)."""
    try:
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.machine()


def is_checkout(root: Path = ROOT) -> bool:
    """Whether `root` is the project's own tree; an installed package has the benchmarks alone."""
    return (root / "pyproject.toml").is_file()


def commit(root: Path) -> str | None:
    """The abbreviated commit of the tree at `root`, with "+" if it has changes."""
    if not is_checkout(root):
        return None  # the repository around it is somebody else's
    try:
        done = subprocess.run(
            ("git", "-C", str(root), "describe", "--always", "--exclude=*", "--dirty=+"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None  # no git, or no repository
    return done.stdout.strip() or None
