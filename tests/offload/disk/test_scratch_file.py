"""The scratch file: its space, its budget, its transfers, and that nothing of it stays behind."""

import errno
import os
import stat

import pytest
import torch

from offload.cache.slot_cache import Transfers
from offload.disk import scratch_file as store
from offload.disk.directories import check_directory
from offload.disk.scratch_file import ScratchFile, make_io_engine
from offload.errors import BudgetError, HeteroError, StoreError
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.sizes import PAGE_BYTES
from offload.memory.tiers import Account, Tier
from tests.support.native.scratch_files import MIB, memory_of, read_from
from tests.support.own_process import descriptors

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount and change user")


def reserved(ledger: Ledger) -> int:
    return ledger.used(Tier.DISK, Account.OPTIM_STATE)


class TestFile:
    def test_it_has_no_name_and_goes_with_its_descriptor(self, tmp_path, ledger):
        before = descriptors()
        scratch = ScratchFile(str(tmp_path), ledger, Account.OPTIM_STATE)
        scratch.reserve(MIB)
        assert list(tmp_path.iterdir()) == []
        status = os.fstat(scratch.members[0].fd)
        assert status.st_nlink == 0
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert not os.get_inheritable(scratch.members[0].fd)
        scratch.close()
        assert descriptors() <= before

    def test_space_is_allocated_and_not_only_promised(self, scratch, ledger):
        assert scratch.reserve(MIB) == 0
        assert scratch.reserve(PAGE_BYTES) == MIB
        status = os.fstat(scratch.members[0].fd)
        assert status.st_size == scratch.nbytes == reserved(ledger) == MIB + PAGE_BYTES
        assert status.st_blocks * 512 >= MIB + PAGE_BYTES

    def test_sizes_are_whole_pages(self, scratch, ledger):
        assert scratch.reserve(1) == 0
        assert scratch.reserve(PAGE_BYTES + 1) == PAGE_BYTES
        assert scratch.reserve(0) == 3 * PAGE_BYTES
        assert scratch.nbytes == reserved(ledger) == 3 * PAGE_BYTES

    def test_fresh_space_reads_zero(self, scratch):
        scratch.reserve(4 * PAGE_BYTES)
        tensor, memory = memory_of(4 * PAGE_BYTES)
        read_from(scratch, memory, 0)
        assert not tensor.any()

    def test_a_closed_file_is_refused_with_an_error(self, scratch):
        scratch.reserve(PAGE_BYTES)
        scratch.close()
        with pytest.raises((StoreError, BudgetError)):
            scratch.reserve(PAGE_BYTES)

    def test_the_capacity_is_a_budget(self, scratch, ledger):
        scratch.reserve(8 * MIB)
        with pytest.raises(BudgetError, match="disk"):
            scratch.reserve(1)
        assert (
            os.fstat(scratch.members[0].fd).st_size == scratch.nbytes == reserved(ledger) == 8 * MIB
        )

    def test_errors_are_of_both_families(self, tmp_path, ledger):
        with pytest.raises(StoreError) as refusal:
            ScratchFile(str(tmp_path / "none"), ledger, Account.OPTIM_STATE)
        assert isinstance(refusal.value, HeteroError)
        assert isinstance(refusal.value, OSError)
        assert refusal.value.filename == str(tmp_path / "none")


class TestDirectory:
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


class TestEngines:
    def test_auto_falls_back_to_threads_and_says_so(self, monkeypatch):
        real = store.IoEngine

        def refusing(kind, **options):
            if kind == "io_uring":
                raise OSError(errno.EPERM, "io_uring is disabled here")
            return real(kind, **options)

        monkeypatch.setattr(store, "IoEngine", refusing)
        engine, notes = make_io_engine("auto")
        assert engine.kind == "threads"
        (note,) = notes
        assert "io_uring is not available: " in note
        assert "io_uring is disabled here" in note
        engine.close()

    def test_what_was_asked_for_is_not_replaced(self, monkeypatch):
        engine, notes = make_io_engine("threads")
        assert (engine.kind, notes) == ("threads", [])
        engine.close()

        def refusing(kind, **options):
            raise OSError(errno.EPERM, "io_uring is disabled here")

        monkeypatch.setattr(store, "IoEngine", refusing)
        with pytest.raises(OSError, match="disabled here"):
            make_io_engine("io_uring")

    def test_transfers_of_a_scratch_file(self, scratch, ledger):
        before = descriptors()
        engine, _ = make_io_engine("auto")
        scratch.reserve(4 * PAGE_BYTES)
        transfers = Transfers(engine, scratch)
        arena = HostArena(2, 4 * PAGE_BYTES, ledger, Account.BUFFER)
        out, back = (arena.view(slot, 1, torch.uint8) for slot in range(2))
        out.random_(0, 256)
        transfers.write(arena.address(0), 4 * PAGE_BYTES, 0).wait()
        transfers.read(arena.address(1), 4 * PAGE_BYTES, 0).wait()
        assert torch.equal(out, back)
        transfers.close()
        transfers.close()
        with pytest.raises(ValueError, match="file"):
            transfers.read(arena.address(1), 4 * PAGE_BYTES, 0)
        engine.close()
        assert descriptors() <= before

    def test_the_file_may_go_while_the_engine_transfers(self, scratch, ledger):
        engine, _ = make_io_engine("auto")
        scratch.reserve(4 * MIB)
        transfers = Transfers(engine, scratch)
        arena = HostArena(1, 4 * MIB, ledger, Account.BUFFER)
        op = transfers.write(arena.address(0), 4 * MIB, 0)
        scratch.close()
        op.wait()
        transfers.close()
        engine.close()
