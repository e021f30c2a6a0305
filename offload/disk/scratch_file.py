"""Scratch space on NVMe: preallocated files, one per directory, used as one."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from offload._native import IoEngine, IoOp, NativeIoError, StripeMap
from offload.disk.bandwidth import AREA_BYTES, DEPTH, WINDOW_S, measure_rates
from offload.disk.directories import check_directories, filesystem_of, format_free, free_bytes
from offload.disk.file_member import MemberFile
from offload.errors import StoreError
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.operation import Operation
from offload.memory.sizes import PAGE_BYTES, format_bytes, round_up
from offload.memory.tiers import Account, Tier

# Per directory: enough to keep one NVMe disk busy.
_QUEUE_DEPTH = 32
_THREADS = DEPTH

UNIT_BYTES = 1 << 20
MAX_PLACES = 16  # a short pattern keeps every directory busy within a few units
_MORE_PLACES = (MAX_PLACES, 4 * MAX_PLACES, 16 * MAX_PLACES)  # where space is tight
_TOLERANCE = 1.05  # a pattern this much slower than the best is taken if it is shorter


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
    decided once: by balance(), or at the first reserve() in proportion to free space. `notes` says
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
            if len(self.members) == 1:
                self._deal([1], "")
            else:
                # Nothing is known of the speeds nor of the size: use all the space there is.
                free, filesystems = self._space()
                shares = [
                    max(1.0, room / filesystems.count(filesystem))
                    for room, filesystem in zip(free, filesystems, strict=True)
                ]
                weights = choose_weights(shares, 0, free, filesystems)
                assert weights is not None  # nothing fits everywhere
                self._deal(weights, "in proportion to free space")
        assert self._stripes is not None
        return self._stripes

    def balance(self, engine: IoEngine, nbytes: int) -> None:
        """Deals the units in proportion to bandwidth, such that `nbytes` fit; before reserve().

        Several directories are measured for a quarter of a second, with reads and writes on all of
        them. One without room for that counts as the slowest; all count as equally fast if `nbytes`
        is too little, or one of them knows no O_DIRECT. Raises BudgetError, and StoreError for a
        directory that cannot be measured.
        """
        if self._stripes is not None or len(self.members) == 1:
            return
        free, filesystems = self._space()
        roomy = [
            member
            for member, fs, room in zip(self.members, filesystems, free, strict=True)
            if AREA_BYTES * filesystems.count(fs) <= room
        ]
        full = ", ".join(member.directory for member in self.members if member not in roomy)
        cached = ", ".join(member.directory for member in self.members if not member.direct)
        rates = [1.0] * len(self.members)
        if nbytes < AREA_BYTES * len(self.members):
            how = "too little is to be stored to measure the disks"
        elif cached:
            how = f"not measured: without O_DIRECT in {cached} it would be the page cache"
        elif len(roomy) < 2:
            how = f"not measured: too little free space in {full}"
        else:
            measured = dict(zip(roomy, self._measure(engine, roomy), strict=True))
            rates = [measured.get(member, min(measured.values())) for member in self.members]
            speeds = ", ".join(f"{format_bytes(rate)}/s" for rate in measured.values())
            how = f"measured {speeds}, reading and writing together for {WINDOW_S} s"
            if full:
                how += f"; not measured, for want of free space: {full}"
        weights = choose_weights(rates, nbytes, free, filesystems)
        # If it cannot fit, reserve() says what is missing where.
        self._deal(weights or [1] * len(self.members), how)

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

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fills page-aligned `memory` from the file, in this thread. Raises StoreError."""
        self._each_part(memory, offset, MemberFile.read_into)

    def write_from(self, memory: memoryview, offset: int) -> None:
        """Writes page-aligned `memory` to the file, in this thread. Raises StoreError."""
        self._each_part(memory, offset, MemberFile.write_from)

    def close(self) -> None:
        """Frees the space, unless the files have a name; idempotent."""
        if self.members:
            self._close_members()
            self._ledger.release(Tier.DISK, self._account, self.nbytes)
            self.nbytes = 0

    def _close_members(self) -> None:
        for member in self.members:
            member.close()
        self.members = []

    def _space(self) -> tuple[list[int], list[int]]:
        """Of each member's directory, the free bytes and the filesystem."""
        directories = [member.directory for member in self.members]
        return list(map(free_bytes, directories)), list(map(filesystem_of, directories))

    def _measure(self, engine: IoEngine, members: Sequence[MemberFile]) -> list[float]:
        area_bytes = AREA_BYTES * len(members)
        self._ledger.charge(Tier.DISK, self._account, area_bytes)
        try:
            self._resize([AREA_BYTES if member in members else 0 for member in self.members])
            return measure_rates(engine, members)
        except NativeIoError as error:
            raise StoreError(
                error.errno, f"the disk cannot be measured: {error}", error.filename
            ) from error
        finally:
            try:
                self._resize([0] * len(self.members))
            finally:
                self._ledger.release(Tier.DISK, self._account, area_bytes)

    def _deal(self, weights: Sequence[int], how: str) -> None:
        """Decides for `weights`; a member that gets nothing is closed."""
        if len(weights) > 1:
            pairs = zip(self.members, weights, strict=True)
            dealt = ", ".join(f"{member.directory} {weight}" for member, weight in pairs)
            self.notes.append(
                f"striped over {len(weights)} directories, {format_bytes(UNIT_BYTES)} at a time in "
                f"turns of {sum(weights)}: {dealt} ({how})"
            )
            if len(set(self._space()[1])) < len(weights):
                self.notes.append("some directories of nvme_path share a filesystem and its disk")
        for member, weight in zip(list(self.members), weights, strict=True):
            if weight == 0:
                unused = (
                    f"{member.directory} is not used: too slow or too full compared with the others"
                )
                self.notes.append(unused)
                member.remove()
                self.members.remove(member)
        self._stripes = StripeMap([weight for weight in weights if weight], UNIT_BYTES)

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

    def _each_part(
        self,
        memory: memoryview,
        offset: int,
        transfer: Callable[[MemberFile, memoryview, int], None],
    ) -> None:
        done = 0
        while done < len(memory):
            if not self.members:
                raise StoreError(errno.EBADF, "the scratch file is closed", "")
            member, member_offset, run_bytes = self.stripes.place(offset + done)
            part = memory[done : done + run_bytes]
            transfer(self.members[member], part, member_offset)
            done += len(part)


def checksum_bytes(file_bytes: int) -> int:
    """RAM of the checksums of so much of a file: four bytes a page."""
    return -(-file_bytes // PAGE_BYTES) * 4


class Transfers:
    """Asynchronous transfers of one scratch file."""

    def __init__(self, engine: IoEngine, scratch: ScratchFile, checksums: bool = False) -> None:
        """`checksums`: what is read is compared with the checksums of what was written."""
        self.engine = engine
        # First, because deciding may let members go.
        stripes = scratch.stripes
        members = [(m.fd, m.path) for m in scratch.members]
        self.file = engine.add_striped_file(members, stripes, checksums)

    def read(self, address: int, nbytes: int, offset: int, soon: bool = False) -> IoOp:
        """Starts reading file bytes [offset, offset + nbytes) to `address`.

        `soon`: nobody waits for it yet, so it comes after what somebody waits for (IoOp.hurry()).
        """
        return self.engine.read(self.file, address, nbytes, offset, soon)

    def write(self, address: int, nbytes: int, offset: int, soon: bool = False) -> IoOp:
        """Starts writing `nbytes` at `address` to the file at `offset`; `soon` as for read()."""
        return self.engine.write(self.file, address, nbytes, offset, soon)

    def close(self) -> None:
        """Waits for the transfers under way; idempotent."""
        if self.file >= 0:
            self.engine.remove_file(self.file)
            self.file = -1


def choose_weights(
    rates: Sequence[float], nbytes: int, free: Sequence[int], filesystems: Sequence[int]
) -> list[int] | None:
    """Weights under which `nbytes` move fastest and fit; None if no pattern fits.

    `rates` are bytes per second, positive; `free` the free bytes of each directory's filesystem,
    and directories with the same number in `filesystems` share them. The time of a pattern is
    max(weight / rate): the slowest member's. A directory so slow that others would wait for it
    gets 0. The shortest pattern within 5 % of the best is taken.
    """
    room = dict(zip(filesystems, free, strict=True))

    def fastest(places: int) -> list[int] | None:
        """Deals `places` one by one to who is done with one more first, as far as there is room."""
        weights = [0] * len(rates)
        left = {fs: room[fs] * places // max(1, nbytes) for fs in room}
        for _ in range(places):
            open_ = [member for member, fs in enumerate(filesystems) if left[fs] > 0]
            if not open_:
                return None
            taker = min(open_, key=lambda member: (weights[member] + 1) / rates[member])
            weights[taker] += 1
            left[filesystems[taker]] -= 1
        return weights

    for most in _MORE_PLACES:
        found: list[tuple[float, list[int]]] = []
        for places in range(1, most + 1):
            weights = fastest(places)
            if weights and fits(weights, nbytes, room, filesystems):
                slowest = max(w / rate for w, rate in zip(weights, rates, strict=True))
                found.append((slowest / places, weights))
        if found:
            best = min(cost for cost, _ in found)
            return next(weights for cost, weights in found if cost <= best * _TOLERANCE)
    return None


def fits(
    weights: Sequence[int], nbytes: int, room: dict[int, int], filesystems: Sequence[int]
) -> bool:
    """Whether the shares of `nbytes` under `weights` are within the `room` of each filesystem."""
    used = [(w, filesystem) for w, filesystem in zip(weights, filesystems, strict=True) if w]
    stripes = StripeMap([w for w, _ in used], UNIT_BYTES)
    left = dict(room)
    for member, (_, filesystem) in enumerate(used):
        left[filesystem] -= stripes.member_bytes(member, nbytes)
    return min(left.values()) >= 0


class Backing(Protocol):
    """Moves a chunk between its home and slots of an arena."""

    def read(self, chunk: int, slot: int) -> Operation:
        """Starts filling the slots from `slot` on."""


class WritableBacking(Backing, Protocol):
    """A Backing of chunks that may change in their slots."""

    def write(self, chunk: int, slot: int) -> Operation:
        """Starts taking the slots' bytes home."""


@dataclass(frozen=True)
class Extent:
    """Where a chunk's kind of state lies in the file."""

    offset: int  # bytes
    nbytes: int  # transferred; at most run * slot_bytes
    run: int  # consecutive slots it takes


class FileTransfers(Protocol):
    """Asynchronous transfers of one file; addresses, sizes and offsets are whole pages."""

    def read(self, address: int, nbytes: int, offset: int) -> Operation:
        """Starts reading to `address`. Raises NativeIoError if it cannot be started."""

    def write(self, address: int, nbytes: int, offset: int) -> Operation:
        """Starts writing from `address`. Raises NativeIoError if it cannot be started."""


class FileBacking:
    """Chunks whose home is in the file."""

    def __init__(
        self,
        arena: HostArena,
        transfers: FileTransfers,
        extents: Mapping[int, Extent],
        before_read: Callable[[int], object] | None = None,
        before_write: Callable[[int], object] | None = None,
    ) -> None:
        """
        Args:
            arena: Has the slots.
            transfers: Those of the file.
            extents: Where the chunks are in the file, by chunk.
            before_read: Called with a chunk before it is read: waits until the file has what it is
                to have. What it raises, read() raises.
            before_write: Likewise, before the bytes of its slots are written.
        """
        self._arena = arena
        self._transfers = transfers
        self._extents = extents
        self._before_read = before_read
        self._before_write = before_write

    def read(self, chunk: int, slot: int) -> Operation:
        """Starts a read. Raises NativeIoError if it cannot be started."""
        if self._before_read is not None:
            self._before_read(chunk)
        extent = self._extents[chunk]
        return self._transfers.read(self._arena.address(slot), extent.nbytes, extent.offset)

    def write(self, chunk: int, slot: int) -> Operation:
        """Starts a write. Raises NativeIoError if it cannot be started."""
        if self._before_write is not None:
            self._before_write(chunk)
        extent = self._extents[chunk]
        return self._transfers.write(self._arena.address(slot), extent.nbytes, extent.offset)
