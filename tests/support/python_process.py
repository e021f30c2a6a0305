"""Programs that run in a process of their own, whose memory nothing else is in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# One thread of torch's is enough; and malloc would reserve 64 MiB of addresses for each.
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}


def start_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What became of `python *arguments`, which may fail."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, **ENVIRONMENT},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


def run_python(*arguments: str) -> str:
    """What `python *arguments` prints."""
    done = start_python(*arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
