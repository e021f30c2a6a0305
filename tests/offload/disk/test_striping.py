"""offload/store over several directories."""

import errno
import os
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload._native import NativeIoError, StripeMap
from offload.cache.slot_cache import Transfers
from offload.disk import scratch_file as store
from offload.disk.directories import check_directories, free_bytes, total_free_bytes
from offload.disk.scratch_file import ScratchFile, choose_weights, make_io_engine
from offload.errors import StoreError
from offload.memory.ledger import Ledger
from offload.memory.sizes import PAGE_BYTES
from offload.memory.tiers import Account, Tier
from tests.support.native.scratch_files import MIB, memory_of, read_from
from tests.support.own_process import descriptors

GIB = 1 << 30


@pytest.fixture
def directories(tmp_path):
    made = [tmp_path / name for name in "abc"]
    for directory in made:
        directory.mkdir()
    return [str(directory) for directory in made]


@pytest.fixture
def ledger():
    return Ledger({Tier.DISK: 256 * MIB})


@pytest.fixture
def scratch(directories, ledger):
    made = ScratchFile(directories, ledger, Account.OPTIM_STATE)
    yield made
    made.close()


@pytest.fixture
def engine():
    made, _ = make_io_engine("auto", 3)
    yield made
    made.close()


def sizes(scratch: ScratchFile) -> list[int]:
    return [os.fstat(member.fd).st_size for member in scratch.members]


class TestSpace:
    def test_each_directory_holds_its_share(self, scratch, ledger):
        assert scratch.reserve(9 * MIB) == 0
        assert scratch.reserve(MIB // 2) == 9 * MIB
        assert sizes(scratch) == [3 * MIB + MIB // 2, 3 * MIB, 3 * MIB]
        blocks = [os.fstat(member.fd).st_blocks * 512 for member in scratch.members]
        assert all(b >= s for b, s in zip(blocks, sizes(scratch), strict=True))
        assert scratch.nbytes == ledger.used(Tier.DISK, Account.OPTIM_STATE) == 9 * MIB + MIB // 2

    def test_close_gives_everything_back(self, directories, ledger):
        before = descriptors()
        scratch = ScratchFile(directories, ledger, Account.OPTIM_STATE)
        scratch.reserve(9 * MIB)
        assert len(descriptors() - before) == 3
        scratch.close()
        scratch.close()
        assert descriptors() <= before
        assert ledger.used(Tier.DISK, Account.OPTIM_STATE) == 0

    def test_a_member_that_cannot_grow_is_named_and_the_others_shrink_again(
        self, scratch, ledger, directories, monkeypatch
    ):
        scratch.reserve(3 * MIB)
        real = os.posix_fallocate

        def failing(fd, offset, nbytes):
            if fd == scratch.members[1].fd:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(fd, offset, nbytes)

        monkeypatch.setattr(os, "posix_fallocate", failing)
        with pytest.raises(
            StoreError, match=r"cannot reserve 2\.0 MiB .* free\): No space left"
        ) as refusal:
            scratch.reserve(6 * MIB)
        assert refusal.value.errno == errno.ENOSPC
        assert refusal.value.filename == directories[1]
        assert sizes(scratch) == [MIB, MIB, MIB]
        assert scratch.nbytes == ledger.used(Tier.DISK, Account.OPTIM_STATE) == 3 * MIB
        monkeypatch.undo()
        assert scratch.reserve(6 * MIB) == 3 * MIB
        assert sizes(scratch) == [3 * MIB] * 3

    def test_an_interrupted_reservation_leaves_nothing(self, scratch, ledger, monkeypatch):
        scratch.reserve(3 * MIB)
        real = os.posix_fallocate

        def interrupted(fd, offset, nbytes):
            if fd == scratch.members[1].fd:
                raise KeyboardInterrupt
            real(fd, offset, nbytes)

        monkeypatch.setattr(os, "posix_fallocate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scratch.reserve(6 * MIB)
        assert sizes(scratch) == [MIB, MIB, MIB]
        assert scratch.nbytes == ledger.used(Tier.DISK, Account.OPTIM_STATE) == 3 * MIB

    def test_an_error_is_told_where_free_space_is_not_known(self, scratch, ledger, monkeypatch):
        scratch.stripes  # noqa: B018  decided while it is known
        monkeypatch.setattr(store, "free_bytes", lambda directory: 100 * MIB)

        def stale(directory):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        def failing(fd, offset, nbytes):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "statvfs", stale)
        monkeypatch.setattr(os, "posix_fallocate", failing)
        with pytest.raises(StoreError, match="an unknown number of bytes free") as failure:
            scratch.reserve(6 * MIB)
        assert failure.value.errno == errno.EIO
        assert ledger.used(Tier.DISK, Account.OPTIM_STATE) == 0

    def test_a_share_that_does_not_fit_is_refused_with_numbers(
        self, scratch, directories, monkeypatch
    ):
        scratch.reserve(3 * MIB)
        self.separate(monkeypatch, directories, 100, 100, 1)
        with pytest.raises(StoreError) as refusal:
            scratch.reserve(30 * MIB)
        assert refusal.value.errno == errno.ENOSPC
        for fact in ("10.0 MiB are needed as its share of 30.0 MiB", "1.0 MiB are free"):
            assert fact in str(refusal.value)
        assert directories[2] in str(refusal.value)
        assert sizes(scratch) == [MIB] * 3

    def test_a_shared_filesystem_has_its_space_once(self, scratch, monkeypatch):
        monkeypatch.setattr(store, "free_bytes", lambda d: 10 * MIB)
        with pytest.raises(StoreError, match="are needed"):
            scratch.reserve(15 * MIB)
        scratch.reserve(9 * MIB)
        assert any("share a filesystem" in note for note in scratch.notes)

    def test_a_full_directory_is_not_used_and_said(self, directories, ledger, monkeypatch):
        self.separate(monkeypatch, directories, 0, 100, 100)
        before = descriptors()
        scratch = ScratchFile(directories, ledger, Account.OPTIM_STATE)
        scratch.deal(40 * MIB)
        assert [member.directory for member in scratch.members] == directories[1:]
        assert any(f"{directories[0]} is not used" in note for note in scratch.notes)
        assert len(descriptors() - before) == 2
        scratch.reserve(40 * MIB)
        scratch.close()

    @staticmethod
    def separate(monkeypatch, directories, *free_mib: int) -> None:
        """Every directory is on a filesystem of its own, which has so many MiB left."""
        room = {name: mib * MIB for name, mib in zip(directories, free_mib, strict=True)}
        monkeypatch.setattr(store, "free_bytes", room.__getitem__)
        monkeypatch.setattr(store, "filesystem_of", hash)


class TestBytes:
    def test_every_disk_takes_part_in_one_transfer(self, scratch, engine):
        scratch.reserve(6 * MIB)
        transfers = Transfers(engine, scratch)
        memory, _ = memory_of(6 * MIB)
        transfers.write(memory.data_ptr(), 6 * MIB, 0).wait()
        for index, member in enumerate(scratch.members):
            got, view = memory_of(2 * MIB)
            os.preadv(member.fd, [view], 0)
            units = memory.view(6, MIB)[index::3]
            assert torch.equal(got.view(2, MIB), units)
        transfers.close()

    def test_growing_does_not_move_what_is_there(self, scratch, engine):
        scratch.reserve(4 * MIB)
        transfers = Transfers(engine, scratch)
        memory, _ = memory_of(4 * MIB)
        address = memory.data_ptr()
        transfers.write(address, 4 * MIB, 0).wait()
        end = scratch.reserve(5 * MIB)
        transfers.write(address, 4 * MIB, end).wait()
        want = memory.clone()
        for offset in (0, end):
            memory.zero_()
            transfers.read(address, 4 * MIB, offset).wait()
            assert torch.equal(memory, want)
        transfers.close()

    def test_an_error_names_the_member(self, scratch, directories, monkeypatch):
        scratch.reserve(3 * MIB)
        os.ftruncate(scratch.members[1].fd, PAGE_BYTES)
        _, memory = memory_of(2 * PAGE_BYTES)
        with pytest.raises(NativeIoError) as failure:
            read_from(scratch, memory, MIB)
        assert directories[1] in str(failure.value)


class TestShares:
    """How many units of the pattern each directory gets; decided once."""

    def test_one_directory_has_all(self, directories, ledger):
        scratch = ScratchFile(directories[0], ledger, Account.OPTIM_STATE)
        scratch.deal(200 * MIB)
        assert (scratch.stripes.pattern, scratch.notes) == ([0], [])
        scratch.close()

    def test_they_are_equal_where_there_is_room(self, scratch):
        scratch.deal(30 * MIB)
        assert scratch.stripes.pattern == [0, 1, 2]
        assert any(note.endswith("(evenly)") for note in scratch.notes)
        notes = list(scratch.notes)
        scratch.deal(60 * MIB)
        assert scratch.notes == notes

    @given(
        nbytes=st.none() | st.integers(1, 400 * GIB),
        free=st.lists(st.integers(0, 200 * GIB), min_size=1, max_size=6),
        shared=st.lists(st.integers(0, 5), min_size=6, max_size=6),
    )
    def test_else_they_follow_the_free_space(self, nbytes, free, shared):
        filesystems = [fs % len(free) for fs in shared[: len(free)]]
        free = [free[fs] for fs in filesystems]  # those on one filesystem see the same
        room = [f // filesystems.count(fs) for f, fs in zip(free, filesystems, strict=True)]
        weights = choose_weights(nbytes, free, filesystems)
        assert sum(weights) > 0
        assert all(places <= 64 for places in weights)
        if nbytes is not None and nbytes <= min(room) * len(room):
            assert set(weights) == {1}
        elif any(room):
            most = max(room)
            top = weights[room.index(most)]
            for each, weight in zip(room, weights, strict=True):
                assert weight <= top * each / most
                assert weight > top * each / most - top / min(64, top) - top / 64

    def test_most_of_the_space_can_be_used(self):
        free = [100 * GIB, 730 * GIB, 290 * GIB]
        for share in (0.5, 0.9, 0.95):
            nbytes = int(share * sum(free))
            stripes = StripeMap(choose_weights(nbytes, free, [0, 1, 2]), MIB)
            assert all(stripes.member_bytes(m, nbytes) <= free[m] for m in range(3))


class TestDirectories:
    def test_one_given_twice_is_refused_under_any_name(self, directories, tmp_path):
        link = tmp_path / "link"
        link.symlink_to(directories[0])
        for again in (directories[0], directories[0] + "/", link):
            with pytest.raises(StoreError, match="twice") as refusal:
                check_directories([directories[0], directories[1], again])
            assert refusal.value.errno == errno.EINVAL

    def test_each_is_checked(self, directories, tmp_path):
        with pytest.raises(StoreError, match="does not exist"):
            check_directories([directories[0], tmp_path / "none"])
        with pytest.raises(StoreError, match="no directory"):
            check_directories([])

    def test_free_space_of_a_filesystem_counts_once(self, directories, monkeypatch):
        full = SimpleNamespace(f_bavail=10, f_frsize=PAGE_BYTES)
        monkeypatch.setattr(os, "statvfs", lambda directory: full)
        assert free_bytes(directories[0]) == 10 * PAGE_BYTES
        assert total_free_bytes(directories) == 10 * PAGE_BYTES

    def test_a_directory_that_fails_leaves_no_descriptor(self, directories, ledger, monkeypatch):
        before = descriptors()
        real = os.open

        def refusing(path, flags, *mode):
            if path == directories[2]:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return real(path, flags, *mode)

        monkeypatch.setattr(os, "open", refusing)
        with pytest.raises(StoreError) as failure:
            ScratchFile(directories, ledger, Account.OPTIM_STATE)
        monkeypatch.undo()
        assert failure.value.filename == directories[2]
        assert descriptors() <= before


def test_engines_for_several_disks_have_deeper_queues(monkeypatch):
    asked = []
    monkeypatch.setattr(
        store, "IoEngine", lambda kind, **o: asked.append((kind, o)) or SimpleNamespace(notes=[])
    )
    make_io_engine("threads")
    make_io_engine("threads", 4)
    make_io_engine("auto", 1000)
    assert asked == [
        ("threads", {"queue_depth": 32, "threads": 4}),
        ("threads", {"queue_depth": 128, "threads": 16}),
        ("io_uring", {"queue_depth": 4096, "threads": 256}),
    ]
