"""A real filesystem that is full, or may only be read: saves and commits lose nothing there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.durable import full_disk
from tests.support.mounts import run_mounted


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_disk_that_is_full_or_read_only(tmp_path: Path) -> None:
    folder = tmp_path / "mounted"
    folder.mkdir()
    run_mounted(folder, full_disk.MOUNT, full_disk.use, folder)
