"""Scratch space on NVMe: one preallocated file that has no name."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import weakref
from collections.abc import Callable

from offload._native import IoEngine, IoOp
from offload.errors import StoreError
from offload.ledger import Ledger
from offload.sizes import PAGE_BYTES, format_bytes, round_up
from offload.tiers import Account, Tier


def make_io_engine(kind: str) -> tuple[IoEngine, list[str]]:
    """The I/O engine of `kind` ("auto", "io_uring" or "threads") and notes on what was refused.

    "auto" takes io_uring and falls back to threads where it was not built or the kernel refuses it.
    """
    if kind != "auto":
        engine = IoEngine(kind)
        return engine, list(engine.notes)
    try:
        engine = IoEngine("io_uring")
        return engine, list(engine.notes)
    except (OSError, ValueError) as refusal:
        return IoEngine("threads"), [
            f"I/O by threads, because io_uring is not available: {refusal}"
        ]


def check_directory(path: str | os.PathLike[str]) -> str:
    """`path` as text if scratch files can be made in it. Raises StoreError that says why not."""
    directory = os.fspath(path)
    if not os.path.exists(directory):
        raise StoreError(
            errno.ENOENT,
            f"nvme_path does not exist; make it first (mkdir -p {directory})",
            directory,
        )
    if not os.path.isdir(directory):
        raise StoreError(errno.ENOTDIR, "nvme_path is not a directory", directory)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise StoreError(errno.EACCES, "nvme_path is not writable for this user", directory)
    return directory


def free_bytes(directory: str) -> int:
    """Bytes an unprivileged user may still write to the filesystem of `directory`."""
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize


class ScratchFile:
    """Reserved file space in `directory`, open until close().

    The file is unlinked from the start, so a killed process leaves nothing behind. O_DIRECT is used
    where the filesystem knows it; `notes` says when it does not. Offsets, sizes and addresses of
    transfers are multiples of PAGE_BYTES.
    """

    def __init__(self, directory: str, ledger: Ledger, account: Account) -> None:
        """Raises StoreError, naming the directory, if a file cannot be made there."""
        self.directory = check_directory(directory)
        self.path = os.path.join(self.directory, "<hetero scratch>")  # for messages
        self.nbytes = 0
        self.notes: list[str] = []
        self._ledger = ledger
        self._account = account
        try:
            self.fd = self._open()
        except OSError as error:
            raise StoreError(
                error.errno, f"cannot make a scratch file: {error.strerror}", self.directory
            ) from error
        self._closer = weakref.finalize(self, os.close, self.fd)

    def reserve(self, nbytes: int) -> int:
        """Grows the file by `nbytes` of allocated space; returns the offset where they begin.

        Raises BudgetError, or StoreError if the filesystem has not so much.
        """
        offset = self.nbytes
        nbytes = round_up(nbytes, PAGE_BYTES)
        if not nbytes:
            return offset
        available = free_bytes(self.directory)
        if nbytes > available:
            raise StoreError(
                errno.ENOSPC,
                f"{format_bytes(nbytes)} are needed but {format_bytes(available)} are free; free "
                f"space, choose another nvme_path, or raise host_memory so that less goes there",
                self.directory,
            )
        self._ledger.charge(Tier.DISK, self._account, nbytes)
        try:
            self._allocate(offset, nbytes)
        except OSError as error:
            self._ledger.release(Tier.DISK, self._account, nbytes)
            raise StoreError(
                error.errno,
                f"cannot reserve {format_bytes(nbytes)} ({format_bytes(available)} free): "
                f"{error.strerror}",
                self.directory,
            ) from error
        self.nbytes += nbytes
        return offset

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

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fills page-aligned `memory` from the file, in this thread. Raises StoreError."""
        self._transfer(os.preadv, "read", memory, offset)

    def write_from(self, memory: memoryview, offset: int) -> None:
        """Writes page-aligned `memory` to the file, in this thread. Raises StoreError."""
        self._transfer(os.pwritev, "write", memory, offset)

    def _transfer(
        self,
        call: Callable[[int, list[memoryview], int], int],
        verb: str,
        memory: memoryview,
        offset: int,
    ) -> None:
        done = 0
        while done < len(memory):
            try:
                moved = call(self.fd, [memory[done:]], offset + done)
            except OSError as error:
                raise StoreError(
                    error.errno,
                    f"{verb} of {len(memory) - done} bytes at offset {offset + done} failed: "
                    f"{error.strerror}; {format_bytes(free_bytes(self.directory))} free",
                    self.path,
                ) from error
            # O_DIRECT goes on at page boundaries only: redo the page that a short transfer cut.
            whole = moved if done + moved == len(memory) else moved & -PAGE_BYTES
            if whole == 0:
                how = f"moved {moved} bytes only" if moved else "met the end of the file"
                raise StoreError(errno.EIO, f"{verb} at offset {offset + done} {how}", self.path)
            done += whole

    def _open(self) -> int:
        try:
            return self._open_unlinked(os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        fd = self._open_unlinked(0)
        self.notes.append(
            f"{self.directory}: the filesystem has no O_DIRECT; transfers go through the page "
            f"cache, whose memory host_memory does not count"
        )
        return fd

    def _open_unlinked(self, direct: int) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | direct
        try:
            return os.open(self.directory, flags | os.O_TMPFILE, 0o600)
        except OSError as error:
            # EISDIR and ENOENT: kernels and filesystems without O_TMPFILE see a directory here.
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
                raise
        named, path = tempfile.mkstemp(prefix="hetero-", dir=self.directory)
        os.close(named)
        try:
            return os.open(path, flags)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def close(self) -> None:
        """Frees the space; idempotent."""
        if self._closer.alive:
            self._closer()
            self.fd = -1
            self._ledger.release(Tier.DISK, self._account, self.nbytes)
            self.nbytes = 0


class Transfers:
    """Asynchronous transfers of one scratch file."""

    def __init__(self, engine: IoEngine, scratch: ScratchFile) -> None:
        self.engine = engine
        self.file = engine.add_file(scratch.fd, scratch.path)

    def read(self, address: int, nbytes: int, offset: int) -> IoOp:
        """Starts reading file bytes [offset, offset + nbytes) to `address`."""
        return self.engine.read(self.file, address, nbytes, offset)

    def write(self, address: int, nbytes: int, offset: int) -> IoOp:
        """Starts writing `nbytes` at `address` to the file at `offset`."""
        return self.engine.write(self.file, address, nbytes, offset)

    def close(self) -> None:
        """Waits for the transfers under way; idempotent."""
        if self.file >= 0:
            self.engine.remove_file(self.file)
            self.file = -1
