"""Scratch files on file systems that know less, are full, or may only be read."""

import errno
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from offload.disk.scratch_file import ScratchFile
from offload.errors import StoreError
from offload.memory.tiers import Account
from tests.support.native.scratch_files import MIB, assert_round_trip
from tests.support.own_process import descriptors

ROOT = Path(__file__).parents[3]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount and change user")


def refuse_flags(monkeypatch, flags_refused: int, error: int) -> None:
    """os.open as on a file system that does not know `flags_refused`."""
    real = os.open

    def refusing(path, flags, *mode):
        if flags & flags_refused == flags_refused:
            raise OSError(error, os.strerror(error), path)
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", refusing)


class TestFileSystemsThatKnowLess:
    @pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT])
    def test_no_unnamed_files(self, tmp_path, ledger, monkeypatch, error):
        refuse_flags(monkeypatch, os.O_TMPFILE, error)
        before = descriptors()
        scratch = ScratchFile(str(tmp_path), ledger, Account.OPTIM_STATE)
        assert list(tmp_path.iterdir()) == []
        assert scratch.notes == []
        assert os.fstat(scratch.members[0].fd).st_nlink == 0
        assert_round_trip(scratch)
        scratch.close()
        assert descriptors() <= before

    def test_neither(self, tmp_path, ledger, monkeypatch):
        real = os.open

        def refusing(path, flags, *mode):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real(path, flags, *mode)

        monkeypatch.setattr(os, "open", refusing)
        scratch = ScratchFile(str(tmp_path), ledger, Account.OPTIM_STATE)
        assert len(scratch.notes) == 1
        assert list(tmp_path.iterdir()) == []
        assert_round_trip(scratch)
        scratch.close()

    def test_other_errors_are_not_taken_for_missing_features(self, tmp_path, ledger, monkeypatch):
        refuse_flags(monkeypatch, os.O_TMPFILE, errno.EROFS)
        with pytest.raises(StoreError) as failure:
            ScratchFile(str(tmp_path), ledger, Account.OPTIM_STATE)
        assert failure.value.errno == errno.EROFS


@needs_root
class TestRealMounts:
    """Each in a private mount namespace, so that nothing outlives the child."""

    def run(self, directory: Path, mount: list[str], body: str) -> str:
        if shutil.which("unshare") is None:
            pytest.skip("no unshare")
        script = textwrap.dedent(
            """
            import subprocess, sys
            mount, directory, root = sys.argv[1].split("|"), sys.argv[2], sys.argv[3]
            if subprocess.run(["mount", *mount, directory]).returncode:
                sys.exit(77)
            sys.path.insert(0, root)
            import errno, os
            from offload.disk import scratch_file as store
            from offload.disk.scratch_file import ScratchFile
            from offload.errors import StoreError
            from offload.memory.ledger import Ledger
            from offload.memory.sizes import PAGE_BYTES
            from offload.memory.tiers import Account
            from tests.support.native.scratch_files import MIB, assert_round_trip
            ledger = Ledger({})
            """
        ) + textwrap.dedent(body)
        command = ["unshare", "-m", sys.executable, "-c", script, "|".join(mount), str(directory)]
        done = subprocess.run([*command, str(ROOT)], capture_output=True, text=True, timeout=120)
        if done.returncode == 77 or "unshare failed" in done.stderr:
            pytest.skip(f"mounting is not permitted: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr
        return done.stdout

    def test_a_full_file_system(self, tmp_path):
        self.run(
            tmp_path,
            ["-t", "tmpfs", "-o", "size=2m", "tmpfs"],
            """
            scratch = ScratchFile(directory, ledger, Account.OPTIM_STATE)
            from offload.disk.directories import free_bytes
            assert free_bytes(directory) == 2 * MIB
            try:
                scratch.reserve(3 * MIB)
            except StoreError as error:
                assert error.errno == errno.ENOSPC, error
                assert "3.0 MiB" in str(error) and "2.0 MiB" in str(error), error
                assert directory in str(error), error
            else:
                raise AssertionError("reserved more than there is")
            assert ledger.in_use_bytes["disk"] == 0
            # What statvfs promised is gone when it is asked for: the kernel's own ENOSPC.
            store.free_bytes = lambda directory: 64 * MIB
            try:
                scratch.reserve(3 * MIB)
            except StoreError as error:
                assert error.errno == errno.ENOSPC, error
            else:
                raise AssertionError("reserved more than there is")
            store.free_bytes = free_bytes
            assert ledger.in_use_bytes["disk"] == scratch.nbytes == 0
            assert_round_trip(scratch, pages=64)
            scratch.close()
            assert free_bytes(directory) == 2 * MIB
            """,
        )

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
        self.run(
            directory,
            ["-o", "loop", str(image)],
            """
            scratch = ScratchFile(directory, ledger, Account.OPTIM_STATE)
            assert_round_trip(scratch, pages=64)
            status = os.fstat(scratch.members[0].fd)
            assert status.st_size == scratch.nbytes == 64 * PAGE_BYTES
            assert status.st_blocks * 512 >= scratch.nbytes
            scratch.close()
            """,
        )
