"""Scratch files on file systems that know less, are full, or may only be read."""

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from offload.disk import scratch_file
from offload.disk.directories import free_bytes
from offload.disk.scratch_file import ScratchFile
from offload.errors import StoreError
from offload.memory.ledger import Ledger
from offload.memory.sizes import PAGE_BYTES
from offload.memory.tiers import Account
from tests.support.mounts import run_mounted
from tests.support.native.scratch_files import MIB, assert_round_trip
from tests.support.own_process import descriptors

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount and change user")


def refuse_flags(monkeypatch, errors: dict[int, int]) -> None:
    """os.open as on a file system that does not know these flags; by flags, the error."""
    real = os.open

    def refusing(path, flags, *mode):
        for refused, error in errors.items():
            if flags & refused == refused:
                raise OSError(error, os.strerror(error), path)
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", refusing)


class TestFileSystemsThatKnowLess:
    @pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT])
    def test_no_unnamed_files(self, tmp_path, ledger, monkeypatch, error):
        refuse_flags(monkeypatch, {os.O_TMPFILE: error})
        before = descriptors()
        scratch = ScratchFile(str(tmp_path), ledger, Account.OPTIM_STATE)
        assert list(tmp_path.iterdir()) == []
        assert scratch.notes == []
        assert os.fstat(scratch.members[0].fd).st_nlink == 0
        assert_round_trip(scratch)
        scratch.close()
        assert descriptors() <= before

    def test_neither(self, tmp_path, ledger, monkeypatch):
        unknown = {os.O_TMPFILE: errno.EOPNOTSUPP, os.O_DIRECT: errno.EINVAL}
        refuse_flags(monkeypatch, unknown)
        scratch = ScratchFile(str(tmp_path), ledger, Account.OPTIM_STATE)
        assert len(scratch.notes) == 1
        assert list(tmp_path.iterdir()) == []
        assert_round_trip(scratch)
        scratch.close()

    def test_other_errors_are_not_taken_for_missing_features(self, tmp_path, ledger, monkeypatch):
        refuse_flags(monkeypatch, {os.O_TMPFILE: errno.EROFS})
        with pytest.raises(StoreError) as failure:
            ScratchFile(str(tmp_path), ledger, Account.OPTIM_STATE)
        assert failure.value.errno == errno.EROFS


def fill_a_file_system(directory: Path) -> None:
    ledger = Ledger({})
    scratch = ScratchFile(str(directory), ledger, Account.OPTIM_STATE)
    assert free_bytes(str(directory)) == 2 * MIB
    with pytest.raises(StoreError, match=r"3\.0 MiB.*2\.0 MiB") as refusal:
        scratch.reserve(3 * MIB)
    assert refusal.value.errno == errno.ENOSPC
    assert str(directory) in str(refusal.value)
    assert ledger.in_use_bytes["disk"] == 0
    # What statvfs promised is gone when it is asked for: the kernel's own ENOSPC.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scratch_file, "free_bytes", lambda directory: 64 * MIB)
        with pytest.raises(StoreError) as refusal:
            scratch.reserve(3 * MIB)
    assert refusal.value.errno == errno.ENOSPC
    assert ledger.in_use_bytes["disk"] == scratch.nbytes == 0
    assert_round_trip(scratch, pages=64)
    scratch.close()
    assert free_bytes(str(directory)) == 2 * MIB


def use_without_preallocation(directory: Path) -> None:
    scratch = ScratchFile(str(directory), Ledger({}), Account.OPTIM_STATE)
    assert_round_trip(scratch, pages=64)
    status = os.fstat(scratch.members[0].fd)
    assert status.st_size == scratch.nbytes == 64 * PAGE_BYTES
    assert status.st_blocks * 512 >= scratch.nbytes
    scratch.close()


@needs_root
class TestRealMounts:
    def test_a_full_file_system(self, tmp_path):
        small = ["-t", "tmpfs", "-o", "size=2m", "tmpfs"]
        run_mounted(tmp_path, small, fill_a_file_system, tmp_path)

    def test_a_file_system_with_direct_transfers_that_cannot_preallocate(self, tmp_path):
        # As ext2, ext3 and NFS before 4.2.
        make = shutil.which("mke2fs") or shutil.which("mke2fs", path="/sbin:/usr/sbin")
        if make is None:
            pytest.skip("no mke2fs")
        image, directory = tmp_path / "image", tmp_path / "mount"
        directory.mkdir()
        with open(image, "wb") as file:
            file.truncate(16 * MIB)
        subprocess.run([make, "-q", "-t", "ext2", str(image)], check=True)
        loop = ["-o", "loop", str(image)]
        run_mounted(directory, loop, use_without_preallocation, directory)
