"""The folder of a checkpoint: crashes and errors at every call leave the old one or the new."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hetero.checkpoint.folder import CheckpointFolder, find_checkpoint, latest_checkpoint
from hetero.checkpoint.manifest import NAME
from offload.disk import new_folder as module
from offload.disk.durable import write_durably
from offload.errors import CheckpointError, StoreError
from tests.support.children import child_that_waits
from tests.support.durable.calls import before_each

DATA = "rank-0.safetensors"
# All calls by which a folder changes, those of shutil.rmtree() too, and opening and locking.
CALLS = [(os, name) for name in ("rename", "fsync", "mkdir", "unlink", "rmdir", "open", "stat")]
CALLS += [(fcntl, "flock"), (module, "_exchange")]


def save(path: Path, content: str, keep: int | None = None) -> None:
    """As hetero.save() does it."""
    folder = CheckpointFolder(path, keep)
    try:
        folder.begin()
        (folder.incomplete / DATA).write_text(content)
        complete(folder, content.encode())
    finally:
        folder.abandon()


def complete(folder: CheckpointFolder, manifest: bytes) -> None:
    with folder.as_store_error("complete the checkpoint"):
        write_durably(folder.incomplete / NAME, manifest)
    folder.complete()


def content_of(path: Path) -> str:
    """What a checkpoint has, whole."""
    content = (path / NAME).read_text()
    assert (path / DATA).read_text() == content
    assert len(os.listdir(path)) == 2
    return content


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


@contextmanager
def calls_counted(before: Callable[[int], None]) -> Iterator[list[str]]:
    """`before` gets the number of each of CALLS before it is made, but for its own; the names are
    what this gives."""
    seen: list[str] = []
    is_before = False

    def count(name: str, _: object) -> None:
        nonlocal is_before
        if is_before:
            return
        seen.append(name)
        is_before = True
        try:
            before(len(seen))
        finally:
            is_before = False

    with before_each(CALLS, count):
        yield seen


def crashes(folder: Path, action: Callable[[], None]) -> list[Path]:
    """Copies of the folder as a process leaves it that dies before each of the calls of `action`;
    and, the last one, as it is after them."""
    found: list[Path] = []

    def copy(call: int) -> None:
        found.append(folder.with_name(f"{folder.name}-{call}"))
        shutil.copytree(folder, found[-1])

    with calls_counted(copy) as seen:
        action()
    copy(len(seen) + 1)
    return found


@pytest.fixture(params=["exchange", "two renames"])
def exchanging(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "two renames":
        monkeypatch.setattr(module, "_exchange", lambda one, other: False)
    return bool(request.param == "exchange")


def test_this_system_exchanges(tmp_path: Path) -> None:
    """Else half of the tests here would test nothing."""
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert module._exchange(tmp_path / "a", tmp_path / "b")
    assert (names(tmp_path / "a"), names(tmp_path / "b")) == (["b"], ["a"])


@pytest.mark.covering(1)
@pytest.mark.parametrize("old", [True, False])
def test_a_crash_before_each_call(old: bool, exchanging: bool, tmp_path: Path) -> None:
    """What is found then is the old one or the new one, whole, and the next save cleans up."""
    folder = tmp_path / "run"
    folder.mkdir()
    if old:
        save(folder / "step-5", "old")
    found = []
    *crashed, complete = crashes(folder, lambda: save(folder / "step-5", "new"))
    for here in (*crashed, complete):
        path = here / "step-5"
        if old or path.exists():
            found.append(content_of(find_checkpoint(path)))
            assert latest_checkpoint(here) == find_checkpoint(path) == find_checkpoint(here)
        else:
            with pytest.raises(CheckpointError, match="step-5"):
                find_checkpoint(path)
            found.append("old")
        save(path, "next")
        assert content_of(path) == "next"
        assert names(here) == ["step-5"]
    assert set(found) == {"old", "new"}
    assert found[-1] == "new"
    assert found.count("old") > 5
    assert found.count("new") > 1 + 3 * old


@pytest.mark.covering(0)
def test_a_crash_before_each_call_of_keep(exchanging: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for step in (8, 9, 10):
        save(folder / f"step-{step}", str(step))
    *crashed, complete = crashes(folder, lambda: save(folder / "step-11", "11", keep=2))
    for here in (*crashed, complete):
        found = latest_checkpoint(here)
        assert found is not None
        assert content_of(found) in (("11",) if here is complete else ("10", "11"))
        for name in names(here):
            if not name.startswith("."):
                assert content_of(here / name) == name[5:]
        save(here / "step-12", "12", keep=2)
        assert len(names(here)) == 2
        assert content_of(find_checkpoint(here)) == "12"
        # (Where it died before it was there, step-11 was never complete.)
        assert names(here) in (["step-11", "step-12"], ["step-10", "step-12"])
    assert len(crashed) > 20


@pytest.mark.covering(1)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
@pytest.mark.parametrize("lasting", [True, False])
def test_an_error_of_each_call(code: int, lasting: bool, exchanging: bool, tmp_path: Path) -> None:
    """It names the path; what was there before is whole, or the new one is."""
    path = tmp_path / "run" / "step-5"
    number, raised, was_made = 0, 0, True
    while was_made:
        number += 1
        save(path, "old")

        def fail(call: int, number: int = number) -> None:
            if call == number or (lasting and call > number):
                raise OSError(code, os.strerror(code))

        with calls_counted(fail) as seen:
            error: Exception | None = None
            try:
                save(path, "new", keep=1)
            except (StoreError, CheckpointError) as caught:
                error = caught
        was_made = len(seen) >= number
        content = content_of(find_checkpoint(path))
        if error is None:
            assert content == "new"
        else:
            raised += 1
            assert str(tmp_path / "run") in str(error)
            assert content in ("old", "new")
        save(path, "next")
        assert content_of(path) == "next"
        assert names(tmp_path / "run") == ["step-5"]
    assert number > 20
    assert raised > 5


def test_an_error_while_the_manifest_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A disk that is full then leaves no checkpoint with half a manifest."""
    save(tmp_path / "a", "old")
    folder = CheckpointFolder(tmp_path / "a")
    folder.begin()
    (folder.incomplete / NAME).symlink_to("/dev/full")
    with pytest.raises(StoreError, match=r"cannot complete the checkpoint: No space left.*/a'"):
        complete(folder, b"new" * 100_000)
    folder.abandon()
    assert content_of(tmp_path / "a") == "old"
    assert names(tmp_path) == ["a"]


def test_a_parent_that_disappears(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "run" / "deep" / "a")
    folder.begin()
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(StoreError, match="cannot complete the checkpoint: No such file.*run/deep"):
        complete(folder, b"new")
    folder.abandon()
    with pytest.raises(StoreError, match="cannot look for earlier checkpoints.*run/deep"):
        folder._remove_others(1)
    save(tmp_path / "run" / "deep" / "a", "next")
    assert content_of(tmp_path / "run" / "deep" / "a") == "next"


def test_two_processes_that_save_to_one_path(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save(path, "old")
    (ready, tell_ready), (go, tell_go) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            CheckpointFolder(path).begin()
            os.write(tell_ready, b"x")
            os.read(go, 1)
        finally:
            os._exit(0)
    os.read(ready, 1)
    second = CheckpointFolder(path)
    with pytest.raises(CheckpointError, match="another process saves .*/a now, in .*/.a.inc"):
        second.begin()
    second.abandon()
    assert names(tmp_path) == [".a.incomplete", "a"]  # it is the other one's
    # One whose name differs in its numbers alone leaves it alone, too.
    save(tmp_path / "a2", "other")
    assert names(tmp_path) == [".a.incomplete", "a", "a2"]
    os.write(tell_go, b"x")
    os.waitpid(child, 0)
    for descriptor in (ready, tell_ready, go, tell_go):
        os.close(descriptor)
    save(path, "new")
    assert content_of(path) == "new"
    assert names(tmp_path) == ["a", "a2"]


def test_a_child_that_was_forked_meanwhile_holds_no_lock(tmp_path: Path) -> None:
    """As a loader's worker is: what it outlives is replaced, and removed, as ever."""
    path = tmp_path / "a"
    folder = CheckpointFolder(path)
    folder.begin()
    (folder.incomplete / DATA).write_text("1")
    with child_that_waits():
        complete(folder, b"1")
        for content in ("2", "3"):
            save(path, content)
            assert content_of(path) == content
            assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("replaced", [True, False])
def test_a_folder_that_another_process_removes_before_it_is_locked(
    replaced: bool, tmp_path: Path
) -> None:
    """Else two processes would write into one folder, and each would remove the other's files."""
    path, real = tmp_path / "a", fcntl.flock
    other = tmp_path / ".a.incomplete"

    def flock(descriptor: int, operation: int) -> None:
        shutil.rmtree(other)
        if replaced:
            other.mkdir()
        real(descriptor, operation)

    folder = CheckpointFolder(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        with pytest.raises(CheckpointError, match="another process saves"):
            folder.begin()
    folder.abandon()
    assert names(tmp_path) == [".a.incomplete"] * replaced


def test_a_folder_that_another_process_has_locked_to_remove_it(tmp_path: Path) -> None:
    path, real, held = tmp_path / "a", os.open, []

    def open_twice(name: Any, flags: int, *args: Any, **more: Any) -> int:
        if str(name).endswith(".incomplete") and not held:
            held.append(real(name, flags))
            fcntl.flock(held[0], fcntl.LOCK_EX)
        return real(name, flags, *args, **more)

    folder = CheckpointFolder(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", open_twice)
        with pytest.raises(CheckpointError, match="another process saves"):
            folder.begin()
    os.close(held[0])
    save(path, "new")
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("saved", "keep", "stay"),
    [
        (["step-8", "step-9", "step-10", "step-11"], 2, ["step-10", "step-11"]),
        (["step-100", "step-20", "step-3"], 2, ["step-100", "step-3"]),
        (["e1-s500", "e2-s100", "e10-s7"], 1, ["e10-s7"]),
        (["e1-s500", "e10-s7", "e2-s100", "e2-s99"], 2, ["e10-s7", "e2-s99"]),
        (["a1", "b1", "a2", "c"], 1, ["a1", "a2", "b1", "c"]),
        (["a1", "b1", "a2", "b7", "a3"], 1, ["a3", "b1", "b7"]),
        (["step-1", "step-2", "step-3"], 7, ["step-1", "step-2", "step-3"]),
        (["last", "last"], 1, ["last"]),
    ],
)
def test_the_ones_with_the_largest_numbers_stay(
    saved: list[str], keep: int, stay: list[str], tmp_path: Path
) -> None:
    """Clocks that go backwards change nothing; neither do other files and folders."""
    (tmp_path / "step-0").mkdir()
    (tmp_path / "step-999").write_text("no checkpoint")
    for age, name in enumerate(saved):
        save(tmp_path / name, name, keep=keep if name == saved[-1] else None)
        os.utime(tmp_path / name, (10**9 - age, 10**9 - age))
    assert names(tmp_path) == sorted([*stay, "step-0", "step-999"])
    for name in stay:
        assert content_of(tmp_path / name) == name


def test_links(tmp_path: Path) -> None:
    """A link's checkpoint is replaced, not the link, and none is removed through a link."""
    save(tmp_path / "elsewhere" / "x", "old")
    (tmp_path / "step-1").symlink_to("elsewhere/x")
    save(tmp_path / "step-1", "new")
    assert (tmp_path / "step-1").is_symlink()
    assert content_of(tmp_path / "elsewhere" / "x") == "new"
    save(tmp_path / "step-2", "2", keep=1)
    assert content_of(tmp_path / "elsewhere" / "x") == "new"
    (tmp_path / ".step-3.removed").symlink_to("elsewhere/x")
    (tmp_path / ".step-4.incomplete").symlink_to("elsewhere/x")
    save(tmp_path / "step-5", "5")
    assert content_of(tmp_path / "elsewhere" / "x") == "new"
    with pytest.raises(CheckpointError, match="if none does, remove that"):
        save(tmp_path / "step-4", "4")


def test_what_is_no_checkpoint_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    for name in ("file", "full"):
        with pytest.raises(ValueError, match=f"{name} is there already, and is no checkpoint"):
            save(tmp_path / name, "new")
        with pytest.raises(CheckpointError, match=name):
            find_checkpoint(tmp_path / name)
    save(tmp_path / "empty", "new")
    assert content_of(tmp_path / "empty") == "new"
    assert names(tmp_path) == ["empty", "file", "full"]


@pytest.mark.parametrize("odd", ["", ".", "..", "/", "nothing/a", "a\0b", "x" * 300])
def test_odd_paths(odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "deep")
    with pytest.raises(CheckpointError, match=re.escape(str(Path(odd)))):
        find_checkpoint(Path(odd))
    assert latest_checkpoint(odd) is None
    if odd != "nothing/a":
        with pytest.raises((ValueError, StoreError)):
            save(Path(odd), "new")
    assert names(tmp_path) == ["deep"]


def test_a_leftover_that_cannot_be_named_back_stays(tmp_path: Path) -> None:
    """Something else has its name by now."""
    save(tmp_path / "step-1", "1")
    os.rename(tmp_path / "step-1", tmp_path / ".step-1.removed")
    assert content_of(find_checkpoint(tmp_path / "step-1")) == "1"
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "mine").touch()
    save(tmp_path / "step-2", "2")
    assert content_of(tmp_path / ".step-1.removed") == "1"
    assert names(tmp_path / "step-1") == ["mine"]


def test_filesystems_that_cannot_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then there are two renames; any other failure is an error."""
    for code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV, errno.EIO):

        class Library:
            @staticmethod
            def renameat2(*args: Any, code: int = code) -> int:
                module.ctypes.set_errno(code)
                return -1

        save(tmp_path / "a", "old")
        with monkeypatch.context() as patch:
            patch.setattr(module.ctypes, "CDLL", lambda *args, **more: Library)
            if code == errno.EIO:
                with pytest.raises(StoreError, match="Input/output error.*/a'"):
                    save(tmp_path / "a", "new")
            else:
                save(tmp_path / "a", "new")
        assert content_of(tmp_path / "a") == ("old" if code == errno.EIO else "new")
        assert names(tmp_path) == ["a"]


def test_the_working_folder_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process, and the shell that has started it, would be in a folder that is removed."""
    save(tmp_path / "saved", "old")
    (tmp_path / "saved" / "deep").mkdir()
    (tmp_path / "empty").mkdir()
    for working, path in (
        ("empty", "."),
        ("saved", "."),
        ("saved/deep", ".."),
        ("saved", "../saved"),
    ):
        monkeypatch.chdir(tmp_path / working)
        with pytest.raises(ValueError, match="is the working folder, or has it in it"):
            save(Path(path), "new")
        assert Path.cwd() == tmp_path / working
    assert sorted(each.name for each in tmp_path.iterdir()) == ["empty", "saved"]
    monkeypatch.chdir(tmp_path / "empty")
    os.rmdir(tmp_path / "empty")
    save(tmp_path / "saved", "new")  # whoever has no working folder loses none


def test_a_parent_that_takes_no_folders_is_no_race() -> None:
    """mkdir() says there that the parent is missing."""
    with pytest.raises(StoreError, match="cannot make a folder for the checkpoint: No such file"):
        save(Path("/proc/self/saved"), "new")


def test_ranks_that_write_elsewhere_are_found(tmp_path: Path) -> None:
    """As those of a machine that does not share the filesystem: by who writes, or else by who
    completes the checkpoint."""
    folder = CheckpointFolder(tmp_path / "saved")
    folder.begin()
    there = CheckpointFolder(tmp_path / "other" / "saved")
    folder.require_seen("rank 0")
    with pytest.raises(CheckpointError, match=r"rank 1 does not see .*/other/\.saved\.incomplete"):
        there.require_seen("rank 1")
    (folder.incomplete / "mine").touch()
    folder.require_files(["mine"])
    with pytest.raises(CheckpointError, match="has no theirs.*all machines share"):
        folder.require_files(["mine", "theirs"])
    folder.abandon()
