"""A real filesystem that is full, or may only be read: saves and commits lose nothing there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_disk_that_is_full_or_read_only(tmp_path: Path) -> None:
    """In a private mount namespace, so that nothing outlives the child."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare")
    folder = tmp_path / "mounted"
    folder.mkdir()
    command = ["unshare", "-m", sys.executable, "-m", "tests.support.durable.full_disk"]
    done = subprocess.run(
        [*command, str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip(f"mounting is not permitted: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
