"""Scratch space on NVMe: preallocated files, one per directory, used as one."""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from offload._native import IoEngine, StripeMap
from offload.disk.directories import check_directories, filesystem_of, format_free, free_bytes
from offload.disk.file_member import MemberFile
from offload.errors import StoreError
from offload.memory.ledger import Ledger
from offload.memory.sizes import PAGE_BYTES, format_bytes, round_up
from offload.memory.tiers import Account, Tier

# Per directory: enough to keep one NVMe disk busy.
_QUEUE_DEPTH = 32
_THREADS = 4

UNIT_BYTES = 1 << 20
_MOST_PLACES = 64  # of the directory with the most space, in a pattern that follows free space


def make_io_engine(kind: str, directories: int = 1) -> tuple[IoEngine, list[str]]:
    """The I/O engine of `kind` ("auto", "io_uring" or "threads") and notes on what was refused.

    "auto" takes io_uring and falls back to threads where it was not built or the kernel refuses it.
    Raises OSError if that is so and "io_uring" was asked for, ValueError for a HETERO_URING_SETUP
    in the environment that does not exist.
    """

    def make(kind: str) -> IoEngine:
        return IoEngine(
            kind,
            queue_depth=min(4096, _QUEUE_DEPTH * directories),
            threads=min(256, _THREADS * directories),
        )

    try:
        engine = make("io_uring" if kind == "auto" else kind)
    except OSError as refusal:
        if kind != "auto":
            raise
        return make("threads"), [f"I/O by threads, because io_uring is not available: {refusal}"]
    return engine, list(engine.notes)


class ScratchFile:
    """Reserved file space in one or several directories, as one file, open until close().

    With several directories the bytes are striped over one member file in each (`stripes`), in
    units of 1 MiB, so that even one transfer uses all disks. How many units a directory gets is
    decided once: by deal(), or at the first reserve() in proportion to free space. `notes` says
    what was decided, and what a filesystem does not know. Offsets, sizes and addresses of transfers
    are multiples of PAGE_BYTES. With a `name`, which no file there has yet, the member files have
    it, and stay after close().
    """

    def __init__(
        self,
        directories: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        ledger: Ledger,
        account: Account,
        name: str | None = None,
    ) -> None:
        """Raises StoreError, naming the directory, if a file cannot be made there."""
        if isinstance(directories, (str, os.PathLike)):
            directories = [directories]
        self.members: list[MemberFile] = []
        self.nbytes = 0
        self._stripes: StripeMap | None = None
        self._ledger = ledger
        self._account = account
        try:
            for directory in check_directories(directories, allow_ram_filesystem=True):
                self.members.append(MemberFile(directory, name))
        except StoreError:
            for member in self.members:
                member.remove()
            raise
        self.notes = [note for member in self.members for note in member.notes]

    @property
    def stripes(self) -> StripeMap:
        """Where the bytes lie in the members; deciding it now if that has not been done."""
        if self._stripes is None:
            self._stripes = self._dealt(None)
        return self._stripes

    def deal(self, nbytes: int) -> None:
        """Decides before reserve() how many units each directory gets, for a file of `nbytes`.

        All get the same number, unless one has no room for that: then their free space decides.
        """
        if self._stripes is None:
            self._stripes = self._dealt(nbytes)

    def reserve(self, nbytes: int) -> int:
        """Grows the file by `nbytes` of allocated space; returns the offset where they begin.

        Raises BudgetError, or StoreError if a filesystem has not its share of so much.
        """
        offset = self.nbytes
        nbytes = round_up(nbytes, PAGE_BYTES)
        if not nbytes:
            return offset
        if not self.members:
            raise StoreError(errno.EBADF, "the scratch file is closed", "")
        stripes = self.stripes
        sizes = [stripes.member_bytes(m, offset + nbytes) for m in range(len(self.members))]
        self._require_free(nbytes, sizes)
        self._ledger.charge(Tier.DISK, self._account, nbytes)
        before = [member.nbytes for member in self.members]
        try:
            self._resize(sizes)
        except BaseException:
            self._ledger.release(Tier.DISK, self._account, nbytes)
            with contextlib.suppress(StoreError):  # the first error is the one that tells why
                self._resize(before)
            raise
        self.nbytes += nbytes
        return offset

    def close(self) -> None:
        """Frees the space, unless the files have a name; idempotent."""
        if self.members:
            for member in self.members:
                member.close()
            self.members = []
            self._ledger.release(Tier.DISK, self._account, self.nbytes)
            self.nbytes = 0

    def _space(self) -> tuple[list[int], list[int]]:
        """Of each member's directory, the free bytes and the filesystem."""
        directories = [member.directory for member in self.members]
        return list(map(free_bytes, directories)), list(map(filesystem_of, directories))

    def _dealt(self, nbytes: int | None) -> StripeMap:
        """Stripes for a file of `nbytes`, None if that is not known; closes members without any."""
        free, filesystems = self._space()
        weights = choose_weights(nbytes, free, filesystems)
        if len(weights) > 1:
            pairs = zip(self.members, weights, strict=True)
            dealt = ", ".join(f"{member.directory} {weight}" for member, weight in pairs)
            how = "evenly" if len(set(weights)) == 1 else "in proportion to free space"
            self.notes.append(
                f"striped over {len(weights)} directories, {format_bytes(UNIT_BYTES)} at a time in "
                f"turns of {sum(weights)}: {dealt} ({how})"
            )
            if len(set(filesystems)) < len(weights):
                self.notes.append("some directories of nvme_path share a filesystem and its disk")
        for member, weight in zip(list(self.members), weights, strict=True):
            if weight == 0:
                self.notes.append(f"{member.directory} is not used: too full beside the others")
                member.remove()
                self.members.remove(member)
        return StripeMap([weight for weight in weights if weight], UNIT_BYTES)

    def _require_free(self, nbytes: int, sizes: Sequence[int]) -> None:
        """StoreError if the members cannot grow to `sizes`, for `nbytes` more in all."""
        needed: dict[int, int] = {}
        for member, available, filesystem, size in zip(
            self.members, *self._space(), sizes, strict=True
        ):
            needed[filesystem] = needed.get(filesystem, 0) + size - member.nbytes
            if needed[filesystem] > available:
                share = f" as its share of {format_bytes(nbytes)}" if len(self.members) > 1 else ""
                raise StoreError(
                    errno.ENOSPC,
                    f"{format_bytes(needed[filesystem])} are needed{share} but "
                    f"{format_bytes(available)} are free; free space, choose another nvme_path, or "
                    f"raise host_memory so that less goes there",
                    member.directory,
                )

    def _resize(self, sizes: Sequence[int]) -> None:
        for member, size in zip(self.members, sizes, strict=True):
            if size == member.nbytes:
                continue
            try:
                member.resize(size)
            except OSError as error:
                raise StoreError(
                    error.errno,
                    f"cannot reserve {format_bytes(size - member.nbytes)} "
                    f"({format_free(member.directory)} free): {error.strerror}",
                    member.directory,
                ) from error


def checksum_bytes(file_bytes: int) -> int:
    """RAM of the checksums of so much of a file: four bytes a page."""
    return -(-file_bytes // PAGE_BYTES) * 4


def choose_weights(
    nbytes: int | None, free: Sequence[int], filesystems: Sequence[int]
) -> list[int]:
    """How many units of the pattern each directory gets; one that is too full may get none.

    Args:
        nbytes: Of the file; None: not known, so all the space there is may be needed.
        free: Free bytes of each directory's filesystem.
        filesystems: Directories with the same number share the filesystem and its space.
    """
    room = [f // filesystems.count(fs) for f, fs in zip(free, filesystems, strict=True)]
    most = max(room)
    if most == 0 or (nbytes is not None and nbytes <= min(room) * len(room)):
        return [1] * len(room)
    weights = [_MOST_PLACES * each // most for each in room]
    divisor = math.gcd(*weights)
    return [weight // divisor for weight in weights]


@dataclass(frozen=True)
class Extent:
    """Where a chunk's kind of state lies in the file."""

    offset: int  # bytes
    nbytes: int  # transferred; at most run * slot_bytes
    run: int  # consecutive slots it takes
