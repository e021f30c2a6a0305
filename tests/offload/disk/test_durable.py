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
def refuse(monkeypatch: pytest.MonkeyPatch) -> object:
    """Makes fsync() of folders, or of files too, fail with an errno."""
    fsync = os.fsync

    def refuse(number: int, files: bool = False) -> None:
        def refusing(descriptor: int) -> None:
            if files or stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(number, os.strerror(number))
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", refusing)

    return refuse


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EBADF])
def test_a_filesystem_without_it_is_told_of(refuse, tmp_path: Path, number: int) -> None:
    refuse(number)
    with pytest.warns(UserWarning, match="cannot make the names in a folder durable") as said:
        sync_path(tmp_path)
    assert str(said[0].message).startswith(f"{tmp_path}: ")
    assert os.strerror(number) in str(said[0].message)
    (tmp_path / "file").touch()
    sync_path(tmp_path / "file")


def test_other_errors_are_raised(refuse, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for number, path in ((errno.EIO, tmp_path), (errno.EINVAL, tmp_path / "file")):
        refuse(number, files=path.is_file())
        with pytest.raises(OSError, match=os.strerror(number)):
            sync_path(path)


def test_checkpoints_are_made_there(refuse, tmp_path: Path) -> None:
    def make() -> tuple[torch.nn.Module, hetero.Optimizer]:
        model = torch.nn.Linear(8, 8)
        return hetero.initialize(
            model, hetero.HybridAdam(model.parameters()), placement_policy="cpu"
        )

    refuse(errno.EINVAL)
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
