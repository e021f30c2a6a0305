"""Reads pieces of files ahead of their use, past the page cache, into a ring of slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch

from offload._native import IoOp, NativeIoError
from offload.disk.scratch_file import make_io_engine
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.sizes import PAGE_BYTES, round_up
from offload.memory.tiers import Account


class FileRange(NamedTuple):
    """Bytes [offset, offset + nbytes) of the I/O engine's file number `file`."""

    file: int
    offset: int
    nbytes: int

    @property
    def page_bytes(self) -> int:
        """Bytes of the pages that have it."""
        return round_up(self.offset % PAGE_BYTES + self.nbytes, PAGE_BYTES)


FileRanges = tuple[FileRange, ...]  # what is read together, and fits into a slot


@dataclass
class _Started:
    piece: FileRanges
    slot: int
    reads: list[IoOp]


class PieceReader:
    """Pieces in the order that expect() was given are read ahead; any others when they are needed.

    Attributes:
        io: the I/O engine, to which the files are added.
        slot_bytes: of a slot, into which the pages of a piece must fit.
    """

    def __init__(self, io_engine: str, slots: int, slot_bytes: int, all_used: bool = False) -> None:
        """Takes memory for the slots, which no budget counts; `io_engine` is as in Config.

        `all_used`: pieces fill most of them, so they are registered with the kernel, which makes
        reads cheaper, and takes all of their memory at once.
        """
        self.slot_bytes = slot_bytes
        self._order: Iterator[FileRanges] = iter(())
        self._ahead: deque[_Started] = deque()
        self._used: _Started | None = None
        with ExitStack() as made:
            self.io, _ = make_io_engine(io_engine)
            made.callback(self.io.close)
            self._arena = HostArena(slots, slot_bytes, Ledger({}), Account.BUFFER)
            made.callback(self._arena.close)
            self._arena.commit(0, slots)
            if all_used:
                self.io.register(self._arena.memory)
            self._free = list(range(slots))
            self._resources = made.pop_all()

    def expect(self, order: Iterable[FileRanges]) -> None:
        """read() is going to be called with these pieces, in this order."""
        self._order = iter(order)
        self._read_ahead()

    def read(self, piece: FileRanges) -> Sequence[torch.Tensor]:
        """The bytes of each extent, in memory that the next call overwrites.

        Raises NativeIoError if they cannot be read.
        """
        if self._used is None or self._used.piece != piece:
            if self._used is not None:
                used, self._used = self._used, None
                self._forget(used)
            self._used = self._take(piece)
            self._read_ahead()
        used = self._used
        try:
            for each in used.reads:
                each.wait()
        except NativeIoError:
            self._used = None
            self._forget(used)
            raise
        found, at = [], 0
        slot = self._arena.view(used.slot, 1, torch.uint8)
        for extent in piece:
            begin = at + extent.offset % PAGE_BYTES
            found.append(slot[begin : begin + extent.nbytes])
            at += extent.page_bytes
        return found

    def _take(self, piece: FileRanges) -> _Started:
        """The piece, whose reading was started before, or is now."""
        if any(each.piece == piece for each in self._ahead):
            while self._ahead[0].piece != piece:
                self._forget(self._ahead.popleft())  # it was not asked for in that order
            return self._ahead.popleft()
        if not self._free:
            self._forget(self._ahead.pop())
        return self._start(piece)

    def _read_ahead(self) -> None:
        while self._free:
            piece = next(self._order, None)
            if piece is None:
                return
            self._ahead.append(self._start(piece))

    def _start(self, piece: FileRanges) -> _Started:
        started, at = _Started(piece, self._free.pop(), []), 0
        try:
            for each in piece:
                address = self._arena.address(started.slot) + at
                first = each.offset & -PAGE_BYTES
                started.reads.append(self.io.read(each.file, address, each.page_bytes, first))
                at += each.page_bytes
        except BaseException:
            self._forget(started)
            raise
        assert at <= self.slot_bytes
        return started

    def _forget(self, started: _Started) -> None:
        for each in started.reads:
            with suppress(NativeIoError):
                each.wait()
        self._free.append(started.slot)

    def close(self) -> None:
        """Waits for what is under way, and frees memory and files; idempotent."""
        for each in (*self._ahead, *([] if self._used is None else [self._used])):
            self._forget(each)
        self._ahead.clear()
        self._used = None
        self._resources.close()
