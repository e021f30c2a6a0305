"""Filesystems that tests mount, each in a process whose mounts are its own and end with it."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks.processes import run_forked

_CLONE_NEWNS = 0x20000


def run_mounted(
    folder: Path, mount: Sequence[str], function: Callable[..., object], *args: Any
) -> None:
    """function(*args) where the arguments `mount` have mounted a filesystem in `folder`; skips
    where that is not permitted."""
    reason = run_forked(_mounted, folder, mount, function, args)
    if reason:
        pytest.skip(f"mounting is not permitted: {reason}")


def _mounted(
    folder: Path, mount: Sequence[str], function: Callable[..., object], args: Sequence[Any]
) -> str:
    """Why nothing could be mounted, or nothing."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        return os.strerror(ctypes.get_errno())
    for arguments in (["--make-rprivate", "/"], [*mount, str(folder)]):
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
        if done.returncode:
            return done.stderr.strip()
    function(*args)
    return ""
