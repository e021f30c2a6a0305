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
import stat
from collections.abc import Iterator
from pathlib import Path

from hetero.checkpoint.manifest import NAME
from offload.disk.durable import sync_path
from offload.errors import CheckpointError, StoreError

_INCOMPLETE, _REMOVED = "incomplete", "removed"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV)


def _beside(path: Path, what: str) -> Path:
    return path.with_name(f".{path.name}.{what}")


def is_checkpoint(path: Path) -> bool:
    """Whether the folder has a manifest, which is written last, and one may look into it."""
    try:
        return _has_manifest(path)
    except (OSError, ValueError):  # (a name with a zero byte)
        return False


def _has_manifest(path: Path) -> bool:
    """The same. Raises OSError where that cannot be known: nothing may be removed then."""
    try:
        return stat.S_ISREG(os.stat(path / NAME).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def find_checkpoint(path: Path) -> Path:
    """`path`, if it is a checkpoint; else the latest one in that folder.

    Raises CheckpointError if there is none.
    """
    if is_checkpoint(path):
        return path
    replaced = _beside(path, _REMOVED) if path.name else path
    if not os.path.lexists(path) and is_checkpoint(replaced):
        return replaced  # the crash came between two renames
    found = latest_checkpoint(path)
    if found is not None:
        return found
    if not os.path.lexists(path):
        raise CheckpointError(f"there is no checkpoint {path}")
    what = "a folder without" if os.path.isdir(path) else "no folder with"
    raise CheckpointError(f"{path} is {what} a checkpoint's {NAME}, or with checkpoints in it")


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint in `folder` with the largest numbers in its name; None if there is none.

    So "step-90" comes before "step-100". No clock has a say.
    """
    try:
        found = {each.name: each for each in Path(folder).iterdir()}
    except (OSError, ValueError):  # (a name with a zero byte)
        return None
    names = {}
    for name, each in found.items():
        own, _, what = name[1:].rpartition(".")
        if not name.startswith("."):
            names[name] = each
        elif own and what == _REMOVED and own not in found:  # the crash came between two renames
            names[own] = each
    checkpoints = {name: each for name, each in names.items() if is_checkpoint(each)}
    latest = max(checkpoints, key=lambda name: (_numbers(name), name), default=None)
    return None if latest is None else checkpoints[latest]


def _numbers(name: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", name)]


def _family(name: str) -> str:
    """What names have in common that differ in their numbers alone."""
    return re.sub(r"\d+", "0", name)


class CheckpointFolder:
    """A checkpoint that is being saved; of several ranks the first one's object changes folders."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Nothing is made yet. Of a link what it points to is replaced."""
        path = os.path.abspath(path)
        self.path = Path(os.path.realpath(path) if os.path.islink(path) else path)
        self.incomplete = _beside(self.path, _INCOMPLETE)
        self._lock = -1

    def begin(self) -> None:
        """Makes the folder for what is not complete, and removes what crashes have left.

        Raises:
            ValueError: at `path` is something that is no checkpoint.
            CheckpointError: another process saves there now.
            StoreError: the folder cannot be made.
        """
        with self._as_store_error("make a folder for the checkpoint"):
            empty = self.path.is_dir() and not any(self.path.iterdir())
            if self.path.exists() and not empty and not _has_manifest(self.path):
                raise ValueError(
                    f"{self.path} is there already, and is no checkpoint; choose another path"
                )
            _make_durable(self.path.parent)
            self._remove_leftovers()
            try:
                self.incomplete.mkdir()
                lock = os.open(self.incomplete, os.O_RDONLY | os.O_CLOEXEC)
                with contextlib.ExitStack() as unless_owned:
                    unless_owned.callback(os.close, lock)
                    if _owns(lock, self.incomplete):
                        unless_owned.pop_all()
                        self._lock = lock
            except (FileExistsError, FileNotFoundError):
                pass
            if self._lock < 0:
                raise CheckpointError(
                    f"another process saves {self.path} now, in {self.incomplete}; if none does, "
                    f"remove that"
                )

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
        for each in list(self.path.parent.iterdir()):
            name, _, what = each.name[1:].rpartition(".")
            ours = each.name.startswith(".") and what in (_INCOMPLETE, _REMOVED)
            if not ours or _family(name) != family:
                continue
            place = each.with_name(name)
            if what == _REMOVED and not _has_manifest(place) and _has_manifest(each):
                with contextlib.suppress(OSError):  # of another number, where another thing is now
                    os.rename(each, place)  # the crash came between two renames
            else:
                _remove_unlocked(each)

    def commit(self, manifest: bytes) -> None:
        """Writes the manifest; then the checkpoint is at `path`, durable. Raises StoreError."""
        with self._as_store_error("complete the checkpoint"):
            with (self.incomplete / NAME).open("wb") as stream:
                stream.write(manifest)
                stream.flush()
                os.fsync(stream.fileno())
            sync_path(self.incomplete)
            self._replace()
            # What is there was made whole: abandon() must not touch what was there before.
            self._unlock()
            sync_path(self.path.parent)
        for leftover in (self.incomplete, _beside(self.path, _REMOVED)):
            _remove_unlocked(leftover)

    def _replace(self) -> None:
        """What is complete gets its name; what had it is at one of the names beside it."""
        if not self.path.exists():
            os.rename(self.incomplete, self.path)
        elif not _exchange(self.incomplete, self.path):
            removed = _beside(self.path, _REMOVED)
            os.rename(self.path, removed)
            try:
                os.rename(self.incomplete, self.path)
            except OSError:
                with contextlib.suppress(OSError):
                    os.rename(removed, self.path)
                raise

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
        with self._as_store_error("look for earlier checkpoints"):
            beside = list(self.path.parent.iterdir())
        others = [
            each
            for each in beside
            if each != self.path
            and _family(each.name) == family
            and is_checkpoint(each)
            and not each.is_symlink()
        ]
        others.sort(key=lambda each: _numbers(each.name), reverse=True)
        for each in others[count - 1 :]:
            removed = _beside(each, _REMOVED)
            with contextlib.suppress(OSError):  # what cannot be removed stays
                os.rename(each, removed)
                _remove(removed)


def _make_durable(folder: Path) -> None:
    """Makes the folder and those that it is in, where they are not there."""
    if not folder.is_dir():
        _make_durable(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_path(folder.parent)


def _remove(folder: Path) -> None:
    """Without a manifest it is no checkpoint any more, whatever comes next. Raises OSError."""
    if not folder.is_dir():
        folder.unlink()
        return
    with contextlib.suppress(FileNotFoundError):
        (folder / NAME).unlink()
    shutil.rmtree(folder)


def _remove_unlocked(folder: Path) -> None:
    """Removes it, if it is there and can be, unless a process that saves there is alive."""
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        descriptor = os.open(folder, flags)
    except OSError:
        return
    # Locked while it is removed, so that nobody takes it for a new one.
    try:
        with contextlib.suppress(OSError):
            if _owns(descriptor, folder):
                _remove(folder)
    finally:
        os.close(descriptor)


def _owns(descriptor: int, folder: Path) -> bool:
    """Whether this process has the lock now, and the folder is still the one that was opened."""
    if not _try_lock(descriptor):
        return False
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(folder))
    except FileNotFoundError:
        return False


def _try_lock(descriptor: int) -> bool:
    """Whether this process has the lock now; filesystems without locks say yes."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno != errno.EWOULDBLOCK
    return True


def _exchange(one: Path, other: Path) -> bool:
    """Two names change places at once; False where the system or the filesystem cannot do that."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    names = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other))
    if rename(*names, _RENAME_EXCHANGE) == 0:
        return True
    # (Where the kernel, the filesystem, or a layer between them does not know it.)
    if ctypes.get_errno() in _CANNOT_EXCHANGE:
        return False
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(other))
