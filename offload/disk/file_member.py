"""One file: the part of the scratch space that lies in one directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import weakref

from offload.disk.descriptors import not_in_children
from offload.errors import StoreError


def open_direct(path: str | os.PathLike[str], flags: int, mode: int = 0o644) -> tuple[int, bool]:
    """Opens a file past the page cache if its filesystem can do that.

    Returns the descriptor, and whether it can. Raises OSError.
    """
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_DIRECT, mode), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    if flags & os.O_EXCL:  # O_DIRECT was refused, once the file was made
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return os.open(path, flags | os.O_CLOEXEC, mode), False


class MemberFile:
    """A new file in `directory`, open until close(); `nbytes` of it are allocated.

    Without a `name` it is unlinked from the start, so a killed process leaves nothing behind; with
    one it stays. O_DIRECT is used where the filesystem knows it (`direct`); `notes` says when it
    does not.
    """

    def __init__(self, directory: str, name: str | None = None) -> None:
        """Raises StoreError, naming the directory, if a file cannot be made there."""
        self.directory = directory
        self._name = name
        self.path = os.path.join(directory, name or "<hetero scratch>")  # for messages
        self.nbytes = 0
        self.direct = True
        self.notes: list[str] = []
        try:
            self.fd = self._open()
        except OSError as error:
            raise StoreError(
                error.errno,
                f"cannot make {'a scratch file' if name is None else name}: {error.strerror}",
                directory,
            ) from error
        self._closer = weakref.finalize(self, os.close, self.fd)
        not_in_children.add(self)

    def resize(self, nbytes: int) -> None:
        """Allocates or gives back space at the end, so that `nbytes` are allocated.

        Raises OSError, with the size as before, if the filesystem has not so much.
        """
        if nbytes > self.nbytes:
            try:
                self._allocate(self.nbytes, nbytes - self.nbytes)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self.fd, self.nbytes)  # what was allocated before it failed
                raise
        else:
            os.ftruncate(self.fd, nbytes)
        self.nbytes = nbytes

    def remove(self) -> None:
        """Closes the file, and takes its name away, if it has one."""
        self.close()
        if self._name is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    def close(self) -> None:
        """Closes the file; that frees the space of one without a name. Idempotent."""
        if self._closer.alive:
            self._closer()
            self.fd = -1
            self.nbytes = 0

    def _allocate(self, offset: int, nbytes: int) -> None:
        try:
            os.posix_fallocate(self.fd, offset, nbytes)
            return
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        # The filesystem cannot preallocate (ext3, NFS before 4.2): the C library then writes to
        # each block, in a way that O_DIRECT does not allow.
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        try:
            os.posix_fallocate(self.fd, offset, nbytes)
        finally:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags)

    def _open(self) -> int:
        if self._name is not None:
            fd, self.direct = open_direct(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        else:
            fd, self.direct = self._open_unlinked()
        if not self.direct:
            self.notes.append(
                f"{self.directory}: the filesystem has no O_DIRECT; transfers go through the page "
                f"cache, whose memory host_memory does not count"
            )
        return fd

    def _open_unlinked(self) -> tuple[int, bool]:
        try:
            return open_direct(self.directory, os.O_RDWR | os.O_TMPFILE, 0o600)
        except OSError as error:
            # EISDIR and ENOENT: kernels and filesystems without O_TMPFILE see a directory here.
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
                raise
        named, path = tempfile.mkstemp(prefix="hetero-", dir=self.directory)
        os.close(named)
        try:
            return open_direct(path, os.O_RDWR)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
