"""The directories of scratch files: which are refused, and with which error."""

import errno
import os

import pytest

from offload.disk import scratch_file as store
from offload.disk.directories import check_directory
from offload.disk.scratch_file import ScratchFile
from offload.errors import StoreError
from offload.memory.tiers import Account
from tests.support.own_process import descriptors

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount and change user")


class TestDirectory:
    def test_paths_become_text(self, tmp_path):
        assert check_directory(tmp_path) == str(tmp_path)

    @needs_root
    def test_not_writable_for_another_user(self, tmp_path):
        # Of a child, because to root everything is writable; by ".", because the directories
        # above are closed to others.
        tmp_path.chmod(0o755)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.chdir(tmp_path)
                os.setgid(65534)
                os.setuid(65534)
                check_directory(".")
            except StoreError as error:
                code = 0 if error.errno == errno.EACCES else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def test_a_directory_that_goes_before_it_is_used_is_named(self, tmp_path, ledger, monkeypatch):
        monkeypatch.setattr(store, "check_directories", lambda paths, **_: tuple(paths))
        with pytest.raises(StoreError, match="cannot make a scratch file.*gone"):
            ScratchFile(str(tmp_path / "gone"), ledger, Account.OPTIM_STATE)

    def test_a_failed_open_leaves_no_descriptor_and_no_name(self, tmp_path, ledger, monkeypatch):
        before = descriptors()
        real = os.open

        def full(path, flags, *mode):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE")
            if flags & os.O_EXCL:
                return real(path, flags, *mode)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "open", full)
        with pytest.raises(StoreError) as failure:
            ScratchFile(str(tmp_path), ledger, Account.OPTIM_STATE)
        monkeypatch.undo()
        assert failure.value.errno == errno.EIO
        assert list(tmp_path.iterdir()) == []
        assert descriptors() <= before
