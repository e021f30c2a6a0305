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


@dataclass(frozen=True)
class ReadPiece:
    """A piece that is being read into a slot."""

    slot: int
    reads: list[IoOp]
    ranges: list[torch.Tensor]

    def contents(self) -> Sequence[torch.Tensor]:
        """The bytes of each range. Raises NativeIoError if they cannot be read."""
        for each in self.reads:
            each.wait()
        return self.ranges


class PieceReader:
    """Reads pieces one after the other, and those that come next meanwhile.

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
        self._started: deque[ReadPiece] = deque()
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

    def pieces(self, order: Iterable[FileRanges]) -> Iterator[ReadPiece]:
        """The pieces in this order, each until the next one is asked for.

        One such iteration is made at a time: the one before ends. Raises NativeIoError.
        """
        self._forget_all()
        waiting = iter(order)
        while True:
            while self._free and (piece := next(waiting, None)) is not None:
                self._start(piece)
            if not self._started:
                return
            yield self._started[0]
            self._forget()

    def _start(self, piece: FileRanges) -> None:
        started, at = ReadPiece(self._free.pop(), [], []), 0
        self._started.append(started)
        slot = self._arena.view(started.slot, 1, torch.uint8)
        for each in piece:
            address, first = self._arena.address(started.slot) + at, each.offset & -PAGE_BYTES
            started.reads.append(self.io.read(each.file, address, each.page_bytes, first))
            begin = at + each.offset % PAGE_BYTES
            started.ranges.append(slot[begin : begin + each.nbytes])
            at += each.page_bytes
        assert at <= self.slot_bytes

    def _forget(self) -> None:
        started = self._started.popleft()
        for each in started.reads:
            with suppress(NativeIoError):
                each.wait()
        self._free.append(started.slot)

    def _forget_all(self) -> None:
        while self._started:
            self._forget()

    def close(self) -> None:
        """Waits for what is under way, and frees memory and files; idempotent."""
        self._forget_all()
        self._resources.close()
