"""offload/store: the scratch file and its engine, on good and on bad file systems."""

import contextlib
import errno
import os
import shutil
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from offload import _native, store
from offload.arena import HostArena
from offload.directories import check_directory
from offload.errors import BudgetError, HeteroError, StoreError
from offload.ledger import Ledger
from offload.sizes import PAGE_BYTES
from offload.store import ScratchFile, Transfers, make_io_engine
from offload.tiers import Account, Tier

MIB = 1 << 20
ROOT = Path(__file__).parents[2]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount and change user")


@pytest.fixture
def ledger():
    return Ledger({Tier.DISK: 8 * MIB})


@pytest.fixture
def scratch(tmp_path, ledger):
    made = ScratchFile(str(tmp_path), ledger, Account.RECORD)
    yield made
    made.close()


def reserved(ledger: Ledger) -> int:
    return ledger.used(Tier.DISK, Account.RECORD)


def memory_of(nbytes: int) -> tuple[torch.Tensor, memoryview]:
    """Page-aligned memory as a tensor, and as what the file is read into."""
    tensor = torch.from_dlpack(_native.Arena(nbytes).export(0, nbytes))
    tensor.random_(0, 256, generator=torch.Generator().manual_seed(nbytes))
    return tensor, memoryview(tensor.numpy())


def open_fds() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.add(f"{fd} -> {os.readlink(f'/proc/self/fd/{fd}')}")
    return found


def assert_round_trip(scratch: ScratchFile, pages: int = 3) -> None:
    offset = scratch.reserve(pages * PAGE_BYTES)
    wrote, memory = memory_of(pages * PAGE_BYTES)
    scratch.write_from(memory, offset)
    read, memory = memory_of(pages * PAGE_BYTES)
    read.zero_()
    scratch.read_into(memory, offset)
    assert torch.equal(read, wrote)


class TestFile:
    def test_it_has_no_name_and_goes_with_its_descriptor(self, tmp_path, ledger):
        before = open_fds()
        scratch = ScratchFile(str(tmp_path), ledger, Account.RECORD)
        scratch.reserve(MIB)
        assert list(tmp_path.iterdir()) == []
        assert os.fstat(scratch.members[0].fd).st_nlink == 0
        assert not os.get_inheritable(scratch.members[0].fd)
        scratch.close()
        assert open_fds() == before

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

    def test_what_is_written_is_read(self, scratch):
        scratch.reserve(2 * PAGE_BYTES)
        assert_round_trip(scratch)

    def test_fresh_space_reads_zero(self, scratch):
        scratch.reserve(4 * PAGE_BYTES)
        tensor, memory = memory_of(4 * PAGE_BYTES)
        scratch.read_into(memory, 0)
        assert not tensor.any()

    def test_close_frees_the_space_once(self, scratch, ledger):
        scratch.reserve(MIB)
        scratch.close()
        scratch.close()
        assert reserved(ledger) == 0
        assert ledger.peak_bytes["disk"] == MIB

    def test_a_closed_file_is_refused_with_an_error(self, scratch):
        scratch.reserve(PAGE_BYTES)
        scratch.close()
        _, memory = memory_of(PAGE_BYTES)
        with pytest.raises(StoreError):
            scratch.read_into(memory, 0)
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
            ScratchFile(str(tmp_path / "none"), ledger, Account.RECORD)
        assert isinstance(refusal.value, HeteroError)
        assert isinstance(refusal.value, OSError)
        assert refusal.value.filename == str(tmp_path / "none")


def test_a_forked_child_does_not_keep_the_file(tmp_path):
    scratch = ScratchFile(tmp_path, Ledger({}), Account.PARAM)
    scratch.reserve(PAGE_BYTES)
    child = os.fork()
    if child == 0:
        mine = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3, 200) if is_open(fd)]
        scratch.close()
        os._exit(any(str(tmp_path) in name for name in mine))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert scratch.nbytes == PAGE_BYTES
    scratch.reserve(PAGE_BYTES)
    scratch.close()


def is_open(fd: int) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


class TestDirectory:
    def test_missing(self, tmp_path):
        with pytest.raises(StoreError, match=r"nvme_path does not exist.*mkdir -p") as refusal:
            check_directory(tmp_path / "none")
        assert refusal.value.errno == errno.ENOENT

    def test_a_file(self, tmp_path):
        file = tmp_path / "file"
        file.touch()
        with pytest.raises(StoreError, match="nvme_path is not a directory") as refusal:
            check_directory(file)
        assert refusal.value.errno == errno.ENOTDIR

    def test_paths_become_text(self, tmp_path):
        assert check_directory(tmp_path) == str(tmp_path)

    def test_not_writable(self, tmp_path, monkeypatch):
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(StoreError, match="nvme_path is not writable") as refusal:
            check_directory(tmp_path)
        assert refusal.value.errno == errno.EACCES

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
        monkeypatch.setattr(store, "check_directories", tuple)
        with pytest.raises(StoreError, match="cannot make a scratch file.*gone"):
            ScratchFile(str(tmp_path / "gone"), ledger, Account.RECORD)

    def test_a_failed_open_leaves_no_descriptor_and_no_name(self, tmp_path, ledger, monkeypatch):
        before = open_fds()
        real = os.open

        def full(path, flags, *mode):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE")
            if flags & os.O_EXCL:
                return real(path, flags, *mode)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "open", full)
        with pytest.raises(StoreError) as failure:
            ScratchFile(str(tmp_path), ledger, Account.RECORD)
        monkeypatch.undo()
        assert failure.value.errno == errno.EIO
        assert list(tmp_path.iterdir()) == []
        assert open_fds() == before


def refuse_flags(monkeypatch, flags_refused: int, error: int) -> None:
    """os.open as on a file system that does not know `flags_refused`."""
    real = os.open

    def refusing(path, flags, *mode):
        if flags & flags_refused == flags_refused:
            raise OSError(error, os.strerror(error), path)
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", refusing)


class TestFileSystemsThatKnowLess:
    def test_no_direct_transfers_is_noted(self, tmp_path, ledger, monkeypatch):
        refuse_flags(monkeypatch, os.O_DIRECT, errno.EINVAL)
        scratch = ScratchFile(str(tmp_path), ledger, Account.RECORD)
        (note,) = scratch.notes
        assert "O_DIRECT" in note
        assert str(tmp_path) in note
        assert_round_trip(scratch)
        scratch.close()

    @pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT])
    def test_no_unnamed_files(self, tmp_path, ledger, monkeypatch, error):
        refuse_flags(monkeypatch, os.O_TMPFILE, error)
        before = open_fds()
        scratch = ScratchFile(str(tmp_path), ledger, Account.RECORD)
        assert list(tmp_path.iterdir()) == []
        assert scratch.notes == []
        assert os.fstat(scratch.members[0].fd).st_nlink == 0
        assert_round_trip(scratch)
        scratch.close()
        assert open_fds() == before

    def test_neither(self, tmp_path, ledger, monkeypatch):
        real = os.open

        def refusing(path, flags, *mode):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real(path, flags, *mode)

        monkeypatch.setattr(os, "open", refusing)
        scratch = ScratchFile(str(tmp_path), ledger, Account.RECORD)
        assert len(scratch.notes) == 1
        assert list(tmp_path.iterdir()) == []
        assert_round_trip(scratch)
        scratch.close()

    def test_other_errors_are_not_taken_for_missing_features(self, tmp_path, ledger, monkeypatch):
        refuse_flags(monkeypatch, os.O_TMPFILE, errno.EROFS)
        with pytest.raises(StoreError) as failure:
            ScratchFile(str(tmp_path), ledger, Account.RECORD)
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
            from tests.offload.test_store import *
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
            scratch = ScratchFile(directory, ledger, Account.RECORD)
            from offload.directories import free_bytes
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

    def test_a_read_only_file_system(self, tmp_path):
        self.run(
            tmp_path,
            ["-t", "tmpfs", "-o", "ro", "tmpfs"],
            """
            try:
                ScratchFile(directory, ledger, Account.RECORD)
            except StoreError as error:
                assert error.errno in (errno.EACCES, errno.EROFS), error
                assert directory in str(error), error
            else:
                raise AssertionError("made a file on a read-only file system")
            """,
        )

    def test_a_file_system_without_direct_transfers(self, tmp_path):
        self.run(
            tmp_path,
            ["-t", "ramfs", "ramfs"],
            """
            # It has no limit, and so says that nothing is free.
            store.free_bytes = lambda directory: 64 * MIB
            scratch = ScratchFile(directory, ledger, Account.RECORD)
            assert len(scratch.notes) == 1 and "O_DIRECT" in scratch.notes[0], scratch.notes
            assert_round_trip(scratch)
            assert os.listdir(directory) == []
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
            scratch = ScratchFile(directory, ledger, Account.RECORD)
            assert_round_trip(scratch, pages=64)
            status = os.fstat(scratch.members[0].fd)
            assert status.st_size == scratch.nbytes == 64 * PAGE_BYTES
            assert status.st_blocks * 512 >= scratch.nbytes
            scratch.close()
            """,
        )


class TestTransfersInThisThread:
    """read_into and write_from, under what the system may answer."""

    PAGES = 8

    @pytest.fixture
    def content(self, scratch):
        wrote, memory = memory_of(self.PAGES * PAGE_BYTES)
        scratch.reserve(self.PAGES * PAGE_BYTES)
        scratch.write_from(memory, 0)
        return wrote

    @pytest.mark.parametrize(
        "most", [PAGE_BYTES, 2 * PAGE_BYTES, PAGE_BYTES + 512, 3 * PAGE_BYTES + 1]
    )
    def test_short_reads_are_gone_on_with(self, scratch, content, monkeypatch, most):
        real, asked = os.preadv, []

        def short(fd, buffers, offset):
            asked.append((offset, len(buffers[0])))
            got = min(most, real(fd, buffers, offset))
            buffers[0][got:] = bytes(len(buffers[0]) - got)
            return got

        read, memory = memory_of(self.PAGES * PAGE_BYTES)
        monkeypatch.setattr(os, "preadv", short)
        scratch.read_into(memory, 0)
        assert len(asked) > 1
        assert all(o % PAGE_BYTES == 0 and n % PAGE_BYTES == 0 for o, n in asked)
        assert torch.equal(read, content)

    @pytest.mark.parametrize(
        "most", [PAGE_BYTES, 2 * PAGE_BYTES, PAGE_BYTES + 512, 3 * PAGE_BYTES + 1]
    )
    def test_short_writes_are_gone_on_with(self, scratch, monkeypatch, most):
        scratch.reserve(self.PAGES * PAGE_BYTES)
        wrote, memory = memory_of(self.PAGES * PAGE_BYTES)
        real, asked = os.pwritev, []

        def short(fd, buffers, offset):
            whole = min(len(buffers[0]), most) & -PAGE_BYTES
            asked.append((offset, len(buffers[0])))
            real(fd, [buffers[0][:whole]], offset)
            return min(len(buffers[0]), most)

        monkeypatch.setattr(os, "pwritev", short)
        scratch.write_from(memory, 0)
        assert len(asked) > 1
        assert all(o % PAGE_BYTES == 0 and n % PAGE_BYTES == 0 for o, n in asked)
        read, memory = memory_of(self.PAGES * PAGE_BYTES)
        read.zero_()
        scratch.read_into(memory, 0)
        assert torch.equal(read, wrote)

    def test_transfers_that_never_get_on_end_in_an_error(self, scratch, content, monkeypatch):
        calls = []

        def stuck(fd, buffers, offset):
            calls.append(offset)
            assert len(calls) < 1000, "would go on for ever"
            return 512

        _, memory = memory_of(self.PAGES * PAGE_BYTES)
        monkeypatch.setattr(os, "preadv", stuck)
        with pytest.raises(StoreError):
            scratch.read_into(memory, 0)

    @pytest.mark.parametrize("verb", ["read", "write"])
    def test_a_failing_disk_is_reported_with_the_place(self, scratch, content, monkeypatch, verb):
        calls = []

        def failing(fd, buffers, offset):
            calls.append(offset)
            if len(calls) == 2:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return PAGE_BYTES

        _, memory = memory_of(self.PAGES * PAGE_BYTES)
        monkeypatch.setattr(os, "preadv" if verb == "read" else "pwritev", failing)
        transfer = scratch.read_into if verb == "read" else scratch.write_from
        with pytest.raises(StoreError) as failure:
            transfer(memory, 0)
        assert failure.value.errno == errno.EIO
        for fact in (
            f"{verb} of {7 * PAGE_BYTES} bytes",
            f"offset {PAGE_BYTES}",
            scratch.members[0].path,
        ):
            assert fact in str(failure.value)

    def test_the_end_of_the_file_is_an_error(self, scratch, content):
        _, memory = memory_of(2 * PAGE_BYTES)
        with pytest.raises(StoreError, match="end of the file") as failure:
            scratch.read_into(memory, (self.PAGES - 1) * PAGE_BYTES)
        assert failure.value.errno == errno.EIO

    def test_nothing_to_move_is_nothing_done(self, scratch, monkeypatch):
        monkeypatch.setattr(os, "preadv", None)
        scratch.read_into(memoryview(bytearray()), 0)


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
        before = open_fds()
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
        assert open_fds() == before

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


def test_a_killed_process_leaves_nothing(tmp_path):
    child = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, sys\n"
            "from offload.store import *\n"
            "s = ScratchFile(sys.argv[1], Ledger({}), Account.RECORD)\n"
            "s.reserve(1 << 20)\n"
            "os.kill(os.getpid(), 9)",
            str(tmp_path),
        ],
        cwd=ROOT,
    )
    assert child.returncode == -9
    assert list(tmp_path.iterdir()) == []
