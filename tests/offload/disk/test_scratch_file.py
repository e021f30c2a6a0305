"""The scratch file: its space, its budget, and that nothing of it stays behind."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from offload.disk import scratch_file as store
from offload.disk.scratch_file import ScratchFile
from offload.errors import BudgetError, HeteroError, StoreError
from offload.memory.ledger import Ledger
from offload.memory.sizes import PAGE_BYTES
from offload.memory.tiers import Account, Tier
from tests.support.native.scratch_files import (
    MIB,
    memory_of,
    read_from,
)
from tests.support.own_process import descriptors

ROOT = Path(__file__).parents[3]


def reserved(ledger: Ledger) -> int:
    return ledger.used(Tier.DISK, Account.OPTIM_STATE)


class TestFile:
    def test_it_has_no_name_and_goes_with_its_descriptor(self, tmp_path, ledger):
        before = descriptors()
        scratch = ScratchFile(str(tmp_path), ledger, Account.OPTIM_STATE)
        scratch.reserve(MIB)
        assert list(tmp_path.iterdir()) == []
        assert os.fstat(scratch.members[0].fd).st_nlink == 0
        assert not os.get_inheritable(scratch.members[0].fd)
        scratch.close()
        assert descriptors() <= before

    def test_only_its_owner_could_read_it(self, scratch):
        assert stat.S_IMODE(os.fstat(scratch.members[0].fd).st_mode) == 0o600

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

    def test_more_than_is_free_is_refused_before_it_is_tried(self, scratch, ledger, monkeypatch):
        monkeypatch.setattr(store, "free_bytes", lambda directory: MIB)
        scratch.reserve(MIB)
        with pytest.raises(StoreError) as refusal:
            scratch.reserve(MIB + 1)
        assert refusal.value.errno == errno.ENOSPC
        for fact in ("1.0 MiB are free", "host_memory", scratch.members[0].directory):
            assert fact in str(refusal.value)
        assert scratch.nbytes == reserved(ledger) == MIB

    def test_space_that_goes_while_it_is_reserved_is_given_back(self, scratch, ledger, monkeypatch):
        def taken_by_others(fd, offset, nbytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", taken_by_others)
        with pytest.raises(StoreError) as refusal:
            scratch.reserve(MIB)
        assert refusal.value.errno == errno.ENOSPC
        assert scratch.nbytes == reserved(ledger) == 0
        monkeypatch.undo()
        assert scratch.reserve(PAGE_BYTES) == 0

    def test_errors_are_of_both_families(self, tmp_path, ledger):
        with pytest.raises(StoreError) as refusal:
            ScratchFile(str(tmp_path / "none"), ledger, Account.OPTIM_STATE)
        assert isinstance(refusal.value, HeteroError)
        assert isinstance(refusal.value, OSError)
        assert refusal.value.filename == str(tmp_path / "none")


def test_a_killed_process_leaves_nothing(tmp_path):
    child = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, sys\n"
            "from offload.disk.scratch_file import *\n"
            "s = ScratchFile(sys.argv[1], Ledger({}), Account.OPTIM_STATE)\n"
            "s.reserve(1 << 20)\n"
            "os.kill(os.getpid(), 9)",
            str(tmp_path),
        ],
        cwd=ROOT,
    )
    assert child.returncode == -9
    assert list(tmp_path.iterdir()) == []
