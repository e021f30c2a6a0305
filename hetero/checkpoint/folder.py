"""The folder of a checkpoint: made beside its place, made durable, and put there at once.

While a save goes on its files are in `.NAME.incomplete`. A crash at any moment leaves the
checkpoint that was there before, or the new one, whole; what is left of the other is recognised by
its name, and goes with the next save.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from hetero.checkpoint.manifest import NAME
from offload.errors import CheckpointError, StoreError

_INCOMPLETE, _REMOVED = "incomplete", "removed"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def _beside(path: Path, what: str) -> Path:
    return path.with_name(f".{path.name}.{what}")


def is_checkpoint(path: Path) -> bool:
    """Whether the folder has a manifest, which is written last."""
    return (path / NAME).is_file()


def find_checkpoint(path: Path) -> Path:
    """`path`, if it is a checkpoint; else the latest one in that folder.

    Raises CheckpointError if there is none.
    """
    if is_checkpoint(path):
        return path
    replaced = _beside(path, _REMOVED)  # where a crash came between two renames
    if not path.exists() and is_checkpoint(replaced):
        return replaced
    found = latest_checkpoint(path)
    if found is not None:
        return found
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint {path}")
    what = "a folder without" if path.is_dir() else "no folder with"
    raise CheckpointError(f"{path} is {what} a checkpoint's {NAME}, or with checkpoints in it")


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint in `folder` with the largest numbers in its name; None if there is none.

    So "step-90" comes before "step-100". No clock has a say.
    """
    try:
        found = [each for each in Path(folder).iterdir() if not each.name.startswith(".")]
    except OSError:
        return None
    checkpoints = [each for each in found if is_checkpoint(each)]
    return max(checkpoints, key=lambda each: (_numbers(each.name), each.name), default=None)


def _numbers(name: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", name)]


def _family(name: str) -> str:
    """What names have in common that differ in their numbers alone."""
    return re.sub(r"\d+", "0", name)


class CheckpointFolder:
    """A checkpoint that is being saved; of several ranks the first one's object changes folders."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Nothing is made yet."""
        self.path = Path(os.path.abspath(path))
        self.incomplete = _beside(self.path, _INCOMPLETE)
        self._lock = -1

    def begin(self) -> None:
        """Makes the folder for what is not complete, and removes what crashes have left.

        Raises:
            ValueError: at `path` is something that is no checkpoint.
            CheckpointError: another process saves there now.
            StoreError: the folder cannot be made.
        """
        empty = self.path.is_dir() and not any(self.path.iterdir())
        if self.path.exists() and not empty and not is_checkpoint(self.path):
            raise ValueError(
                f"{self.path} is there already, and is no checkpoint; choose another path"
            )
        with self._as_store_error("make a folder for the checkpoint"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            try:
                self.incomplete.mkdir()
            except FileExistsError:
                raise CheckpointError(
                    f"another process saves {self.path} now, in {self.incomplete}"
                ) from None
            self._lock = os.open(self.incomplete, os.O_RDONLY | os.O_CLOEXEC)
            _try_lock(self._lock)

    @contextlib.contextmanager
    def _as_store_error(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            path = str(error.filename or self.path)
            raise StoreError(error.errno, f"cannot {what}: {error.strerror}", path) from error

    def _remove_leftovers(self) -> None:
        """Of this name and of those that differ from it in their numbers alone."""
        family = _family(self.path.name)
        for each in self.path.parent.glob(".*"):
            name, _, what = each.name[1:].rpartition(".")
            if what not in (_INCOMPLETE, _REMOVED) or _family(name) != family:
                continue
            if what == _REMOVED and not is_checkpoint(each.with_name(name)) and is_checkpoint(each):
                os.rename(each, each.with_name(name))  # the crash came between two renames
            elif not _is_locked(each):
                shutil.rmtree(each, ignore_errors=True)

    def commit(self, manifest: bytes) -> None:
        """Writes the manifest; then the checkpoint is at `path`, durable. Raises StoreError."""
        with self._as_store_error("complete the checkpoint"):
            with (self.incomplete / NAME).open("wb") as stream:
                stream.write(manifest)
                stream.flush()
                os.fsync(stream.fileno())
            _fsync_folder(self.incomplete)
            removed = _beside(self.path, _REMOVED)
            if self.path.exists():
                if _exchange(self.incomplete, self.path):
                    os.rename(self.incomplete, removed)
                else:
                    os.rename(self.path, removed)
                    os.rename(self.incomplete, self.path)
            else:
                os.rename(self.incomplete, self.path)
            _fsync_folder(self.path.parent)
            shutil.rmtree(removed, ignore_errors=True)
        self._unlock()

    def abandon(self) -> None:
        """Removes what was not completed; idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.incomplete, ignore_errors=True)
            self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def keep(self, count: int) -> None:
        """Of the checkpoints whose names differ from this one's in their numbers alone, this one
        and those with the largest numbers stay, `count` in all."""
        family = _family(self.path.name)
        others = [
            each
            for each in self.path.parent.iterdir()
            if each != self.path and _family(each.name) == family and is_checkpoint(each)
        ]
        others.sort(key=lambda each: _numbers(each.name), reverse=True)
        for each in others[count - 1 :]:
            removed = _beside(each, _REMOVED)
            with contextlib.suppress(OSError):  # what cannot be removed stays
                os.rename(each, removed)
                # Without a manifest it is no checkpoint any more, whatever comes next.
                (removed / NAME).unlink()
                shutil.rmtree(removed)


def _try_lock(descriptor: int) -> bool:
    """Whether this process has the lock now; filesystems without locks say yes."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno != errno.EWOULDBLOCK
    return True


def _is_locked(folder: Path) -> bool:
    """Whether a process that saves there is alive."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _try_lock(descriptor)
    finally:
        os.close(descriptor)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Two names change places at once; False where the system or the filesystem cannot do that."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    names = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other))
    if rename(*names, _RENAME_EXCHANGE) == 0:
        return True
    if ctypes.get_errno() in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(other))
