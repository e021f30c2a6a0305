"""A folder that is made beside its place, made durable, and put there at once.

Until then it is `.NAME.incomplete`, locked by the process that makes it. A crash at any moment
leaves what was there before, or the new one, whole; what is left of the other is recognised by its
name, and goes when the next one is made there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from offload._native import NativeIoError
from offload.disk.descriptors import not_in_children
from offload.disk.durable import sync_path
from offload.errors import CheckpointError, HeteroError, StoreError

INCOMPLETE, REMOVED = "incomplete", "removed"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV)


def beside(path: Path, what: str) -> Path:
    """Where the folder is while it is INCOMPLETE, or what was there before when it is REMOVED."""
    return path.with_name(f".{path.name}.{what}")


class NewFolder:
    """A folder that is being made; of several ranks the first one's object changes folders.

    Attributes:
        path: its place.
        incomplete: where it is until then.
        noun: what it is, in errors.
    """

    def __init__(self, path: str | os.PathLike[str], noun: str = "the checkpoint") -> None:
        """Nothing is made yet. Of a link what it points to is replaced; `noun` is for errors."""
        self.noun = noun
        path = os.path.abspath(path)
        self.path = Path(os.path.realpath(path) if os.path.islink(path) else path)
        self.incomplete = beside(self.path, INCOMPLETE)
        self._lock = -1

    # What a kind of folder has of its own

    def is_whole(self, folder: Path) -> bool:
        """Whether it was whole once, and its removal has not begun. Raises OSError."""
        return folder.is_dir()

    def refuse_other(self) -> None:
        """Raises ValueError if at its place is something that must not be replaced; OSError."""
        if os.path.lexists(self.path) and not self.is_empty:
            raise ValueError(f"{self.path} is there already; give another path, or remove it")

    @property
    def is_empty(self) -> bool:
        """Whether an empty folder is at its place. Raises OSError."""
        return self.path.is_dir() and not any(self.path.iterdir())

    def is_related(self, name: str) -> bool:
        """Whether what crashes have left of a folder of this name goes with this one's."""
        return name == self.path.name

    def remove(self, folder: Path) -> None:
        """Removes it, so that it is not taken for a whole one meanwhile. Raises OSError."""
        shutil.rmtree(folder) if folder.is_dir() else folder.unlink()

    def begin(self) -> None:
        """Makes the folder for what is not complete, and removes what crashes have left.

        Raises:
            CheckpointError: another process makes it now.
            StoreError: the folder cannot be made.
            ValueError: it would replace something else, or the working folder, which programs
                would stay in.
        """
        self._refuse_working_folder()
        with self.as_store_error(f"make a folder for {self.noun}"):
            self.refuse_other()
            make_durable(self.path.parent)
            self._remove_leftovers()
            with contextlib.suppress(FileExistsError):
                self.incomplete.mkdir()
                self._lock_incomplete()
            if self._lock < 0:
                raise CheckpointError(
                    f"another process saves {self.path} now, in {self.incomplete}; if none does, "
                    f"remove that"
                )

    def require_seen(self, who: str) -> None:
        """Raises CheckpointError if this process, `who`, does not see the folder that another one
        has begun, as if it were on a filesystem of another machine."""
        if not self.incomplete.is_dir():
            raise CheckpointError(
                f"{who} does not see {self.incomplete} on {os.uname().nodename}, which the first "
                f"rank has made; all ranks must write to the same folder, on a filesystem that "
                f"all machines share"
            )

    def require_files(self, names: Iterable[str]) -> None:
        """Raises CheckpointError unless the ranks' files are here: one that has another folder of
        the same name has written its file there."""
        missing = [name for name in names if not (self.incomplete / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{self.incomplete} on {os.uname().nodename} has no {missing[0]}, which its rank "
                f"has written to another folder of that name; all ranks must write to the same "
                f"folder, on a filesystem that all machines share"
            )

    def _refuse_working_folder(self) -> None:
        """Raises ValueError if the folder would replace the one that this process works in."""
        with contextlib.suppress(OSError):  # (of a working folder that was removed, say)
            working = Path.cwd()
            above = (working, *working.parents)
            if self.path.is_dir() and any(each.samefile(self.path) for each in above):
                raise ValueError(
                    f"{self.path} is the working folder, or has it in it, and {self.noun} would "
                    f"replace it; give the name of a folder in it, as {working / 'NAME'}"
                )

    def _lock_incomplete(self) -> None:
        """Locks the folder that was made, unless another process has done so since."""
        try:
            lock = os.open(self.incomplete, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return  # it was taken for what a crash had left
        with contextlib.ExitStack() as unless_owned:
            unless_owned.callback(os.close, lock)
            if owns(lock, self.incomplete):
                unless_owned.pop_all()
                self._lock = lock
                not_in_children.add(self)

    @contextlib.contextmanager
    def as_store_error(self, what: str) -> Iterator[None]:
        """Of an OSError in the block makes a StoreError that says what cannot be done."""
        try:
            yield
        except (HeteroError, NativeIoError):
            raise
        except OSError as error:
            path = str(error.filename or self.path)
            raise StoreError(error.errno, f"cannot {what}: {error.strerror}", path) from error

    def _remove_leftovers(self) -> None:
        for each in list(self.path.parent.iterdir()):
            name, _, what = each.name[1:].rpartition(".")
            ours = each.name.startswith(".") and what in (INCOMPLETE, REMOVED)
            if not ours or not self.is_related(name):
                continue
            place = each.with_name(name)
            if what == REMOVED and not self.is_whole(place) and self.is_whole(each):
                with contextlib.suppress(OSError):  # another thing is there now
                    os.rename(each, place)  # the crash came between two renames
            else:
                self._remove_unlocked(each)

    def complete(self) -> None:
        """What was made, and is durable but for its names, is at `path`. Raises StoreError."""
        with self.as_store_error(f"complete {self.noun}"):
            sync_path(self.incomplete)
            self._replace()
            # What is there was made whole: abandon() must not touch what was there before.
            self.close()
            sync_path(self.path.parent)
        for leftover in (self.incomplete, beside(self.path, REMOVED)):
            self._remove_unlocked(leftover)

    def _replace(self) -> None:
        """What is complete gets its name; what had it is at one of the names beside it."""
        if not self.path.exists():
            os.rename(self.incomplete, self.path)
        elif not _exchange(self.incomplete, self.path):
            removed = beside(self.path, REMOVED)
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
            self.close()

    def close(self) -> None:
        """Lets go of the lock; idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _remove_unlocked(self, folder: Path) -> None:
        """Removes it, if it is there and can be, unless a process that makes it is alive."""
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
            descriptor = os.open(folder, flags)
        except OSError:
            return
        # Locked while it is removed, so that nobody takes it for a new one.
        try:
            with contextlib.suppress(OSError):
                if owns(descriptor, folder):
                    self.remove(folder)
        finally:
            os.close(descriptor)


def make_durable(folder: Path) -> None:
    """Makes the folder and those that it is in, where they are not there. Raises OSError."""
    if not folder.is_dir():
        make_durable(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_path(folder.parent)


def owns(descriptor: int, folder: Path) -> bool:
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
