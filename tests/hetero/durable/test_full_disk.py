"""A real filesystem that is full, or may only be read: saves and commits lose nothing there."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from hetero.checkpoint.folder import is_checkpoint
from hetero.checkpoint.formats import convert
from offload.disk import directories
from offload.disk.directories import free_bytes
from tests.support.checkpoint.small_trainings import PLACES, build, steps, whole
from tests.support.mounts import run_mounted
from tests.support.training.loops import same

MOUNT = ["-t", "tmpfs", "-o", f"size={6 << 20}", "tmpfs"]


def fill(folder: Path, left_bytes: int) -> Path:
    """Leaves so many bytes free."""
    path = folder / "filler"
    with path.open("wb") as stream:
        stream.write(bytes(max(0, free_bytes(str(folder)) - left_bytes)))
    return path


def refused(action: Callable[[], object], number: int) -> None:
    """It raises this error, and not another one."""
    found = 0
    try:
        action()
    except hetero.StoreError as error:
        found = error.errno
    assert found == number, (found, number)


def saves(folder: Path, scratch: Path) -> None:
    """Checkpoints, exports and conversions, with so little room that some or all does not fit."""
    model, optimizer = build(PLACES["cpu"], scratch)
    steps(model, optimizer, range(1))
    hetero.save(folder / "saved", model, optimizer)
    stored = whole(model, optimizer)
    steps(model, optimizer, range(1, 2))
    for left in (0, 4096, 50_000, 90_000):
        filler = fill(folder, left)
        refused(lambda: hetero.save(folder / "saved", model, optimizer), errno.ENOSPC)
        refused(lambda: hetero.save(folder / "new", model, optimizer), errno.ENOSPC)
        refused(lambda: convert(folder / "saved", folder / "hf", to="dcp"), errno.ENOSPC)
        if left < 20_000:
            refused(lambda: hetero.save_dcp(folder / "dcp", model, optimizer), errno.ENOSPC)
        assert sorted(each.name for each in folder.iterdir()) == ["filler", "saved"]
        beside = hetero.save(folder / "saved", model, optimizer, blocking=False)
        refused(beside.wait, errno.ENOSPC)
        filler.unlink()
    assert is_checkpoint(folder / "saved")
    hetero.load(folder / "saved", model, optimizer)
    assert same(whole(model, optimizer), stored)
    hetero.save(folder / "saved", model, optimizer)  # there is room again
    optimizer.engine.close()


def commits(folder: Path) -> None:
    """The first commit of a start; those that follow need room only for what has grown."""
    options: dict[str, Any] = {**PLACES["disk"], "durable": True, "commit_every": 0}
    model, optimizer = build(options, folder)
    steps(model, optimizer, range(1))
    filler = fill(folder, 0)
    refused(lambda: hetero.commit(model, blocking=True), errno.ENOSPC)
    optimizer.engine.close()
    filler.unlink()

    model, optimizer = build(options, folder)
    assert hetero.resume(model) is None
    steps(model, optimizer, range(1))
    hetero.commit(model, blocking=True)
    steps(model, optimizer, range(1, 2))
    filler = fill(folder, 0)
    hetero.commit(model, blocking=True)  # a start's first commit has taken the room of the others
    stored = whole(model, optimizer)
    steps(model, optimizer, range(2, 3))
    grown = {"data": torch.ones(1 << 18)}
    refused(lambda: hetero.commit(model, extra=grown, blocking=True), errno.ENOSPC)
    optimizer.engine.close()
    try:
        build(options, folder)  # there is no room for the files of another start
    except (hetero.StoreError, hetero.BudgetError):
        filler.unlink()
    model, optimizer = build(options, folder, seed=7)
    last = hetero.resume(model)
    assert last is not None
    assert last.step == 2
    assert same(whole(model, optimizer), stored)
    optimizer.engine.close()


def read_only(folder: Path, scratch: Path) -> None:
    """It can be loaded from, and not saved to."""
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    model, optimizer = build(PLACES["cpu"], scratch)
    hetero.load(folder / "saved", model, optimizer)
    for name in ("saved", "new"):
        refused(lambda name=name: hetero.save(folder / name, model, optimizer), errno.EROFS)
    refused(lambda: convert(folder / "saved", folder / "hf", to="hf"), errno.EROFS)
    refused(lambda: build({**PLACES["disk"], "durable": True}, folder), errno.EACCES)
    optimizer.engine.close()


def use(folder: Path) -> None:
    """Tries all on what is mounted in the folder by MOUNT."""
    scratch = folder.parent / "scratch"
    scratch.mkdir()
    directories.IN_RAM = ()  # this one plays a disk
    torch.set_num_threads(1)
    commits(folder)
    for path in (folder / "hetero-state").iterdir():
        path.unlink()
    (folder / "hetero-state").rmdir()
    saves(folder, scratch)
    read_only(folder, scratch)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_disk_that_is_full_or_read_only(tmp_path: Path) -> None:
    folder = tmp_path / "mounted"
    folder.mkdir()
    run_mounted(folder, MOUNT, use, folder)
