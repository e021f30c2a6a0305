"""offload/disk/durable: what is on the disk, also on filesystems that cannot say so of folders."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
import torch

import hetero
from offload.disk.durable import sync_path


@pytest.fixture
def refuse_folders(monkeypatch: pytest.MonkeyPatch) -> object:
    """Makes fsync() of folders fail with an errno."""
    fsync = os.fsync

    def refuse(number: int) -> None:
        def refusing(descriptor: int) -> None:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(number, os.strerror(number))
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", refusing)

    return refuse


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EBADF])
def test_a_filesystem_without_it_is_told_of(refuse_folders, tmp_path: Path, number: int) -> None:
    refuse_folders(number)
    with pytest.warns(UserWarning, match="cannot make the names in a folder durable") as said:
        sync_path(tmp_path)
    assert str(said[0].message).startswith(f"{tmp_path}: ")
    assert os.strerror(number) in str(said[0].message)
    (tmp_path / "file").touch()
    sync_path(tmp_path / "file")


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_other_errors_are_raised(refuse_folders, tmp_path: Path, number: int) -> None:
    refuse_folders(number)
    with pytest.raises(OSError, match=os.strerror(number)):
        sync_path(tmp_path)


def test_a_file_that_cannot_be_made_durable_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", refuse)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Invalid argument"):
        sync_path(tmp_path / "file")


def test_checkpoints_are_made_there(refuse_folders, tmp_path: Path) -> None:
    def make() -> tuple[torch.nn.Module, hetero.Optimizer]:
        model = torch.nn.Linear(8, 8)
        return hetero.initialize(
            model, hetero.HybridAdam(model.parameters()), placement_policy="cpu"
        )

    refuse_folders(errno.EINVAL)
    model, optimizer = make()
    with pytest.warns(UserWarning, match="names in a folder"):
        hetero.save(tmp_path / "checkpoint", model, optimizer)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.engine.close()
    model, optimizer = make()
    hetero.load(tmp_path / "checkpoint", model, optimizer)
    for name, value in model.state_dict().items():
        assert torch.equal(value, wanted[name])
    optimizer.engine.close()
