"""Checkpoints whose tensors lie in files in pieces, read ahead of their use past the page cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from hetero.checkpoint.data_writer import Range
from hetero.checkpoint.manifest import name_of
from hetero.checkpoint.stored_checkpoint import StoredCheckpoint
from offload._native import Arena, IoEngine, IoOp, NativeIoError
from offload.disk.scratch_file import make_io_engine
from offload.errors import CheckpointError
from offload.memory.sizes import PAGE_BYTES, round_up

_AHEAD = 10  # pieces, each of at most 2^20 elements but for large buffers, and ends of ranges
_T = TypeVar("_T")


class FileRange(NamedTuple):
    """Bytes [offset, offset + nbytes) of a checkpoint's file number `file`."""

    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredPiece(ABC):
    """Elements [begin, end) of the flat tensor `key`, which are read at once."""

    key: str
    begin: int
    end: int

    @property
    def where(self) -> str:
        """Its name in errors."""
        return f"elements {self.begin} to {self.end} of {self.key!r}"

    @abstractmethod
    def ranges(self) -> list[FileRange]:
        """The bytes of its arrays, of which none is empty."""

    def check(self, arrays: Sequence[torch.Tensor]) -> None:  # noqa: B027
        """Raises CheckpointError if the bytes of the arrays are not as they were written."""

    @abstractmethod
    def values(
        self, key: str, arrays: Sequence[torch.Tensor], begin: int, end: int
    ) -> torch.Tensor:
        """Its elements [begin, end), counted from its own first one, of the tensor `key`."""


class BegunPiece:
    """A piece that is being read, into memory that no budget counts."""

    def __init__(self, piece: StoredPiece, reads: Sequence[tuple[IoOp, torch.Tensor]]) -> None:
        self.piece = piece
        self._reads = reads

    @cached_property
    def arrays(self) -> Sequence[torch.Tensor]:
        """The bytes of its arrays, when they are there. Raises CheckpointError."""
        try:
            for op, _ in self._reads:
                op.wait()
        except NativeIoError as error:
            text = f"{self.piece.where} cannot be read: {error.args[1]}: {error}"
            raise CheckpointError(text) from error
        arrays = [array for _, array in self._reads]
        self.piece.check(arrays)
        return arrays


class PieceCheckpoint(StoredCheckpoint, ABC):
    """A checkpoint whose tensors lie in pieces.

    Attributes:
        small: tensors that are in memory, by key.
    """

    def __init__(self, path: Path, io_engine: str) -> None:
        """Opens no data file yet; `io_engine` is as in Config."""
        super().__init__(path)
        self.small: Mapping[str, torch.Tensor] = {}
        self._io_engine = io_engine
        self._numbers: dict[int, int] = {}  # the I/O engine's, of files

    @abstractmethod
    def _pieces_of(self, key: str) -> Sequence[StoredPiece]:
        """The pieces that have a tensor, in order. Raises CheckpointError."""

    @abstractmethod
    def _open_file(self, io: IoEngine, file: int) -> int:
        """Adds a file to the I/O engine; returns its number there. Raises CheckpointError."""

    @cached_property
    def _io(self) -> IoEngine:
        return make_io_engine(self._io_engine)[0]

    def close(self) -> None:
        """See StoredCheckpoint: waits for what is under way, and closes all files."""
        self._numbers.clear()
        io = self.__dict__.pop("_io", None)
        if io is not None:
            io.close()

    def values(self, order: Iterable[Sequence[Range]]) -> Iterator[tuple[str, int, torch.Tensor]]:
        """See StoredCheckpoint; checksums are verified."""
        ranges = (each for some in order for each in some)
        found: torch.Tensor | None = None
        for (key, begin, end), begun in ahead(self._begun(ranges)):
            if key in self.small:
                found = self.small[key].reshape(-1)[begin:end]
            elif found is None:
                dtype = self.manifest.tensors[key].dtype
                found = torch.empty(end - begin, dtype=dtype, device="cpu")
            if begun is None:
                yield key, begin, found
                found = None
                continue
            piece = begun.piece
            first, last = max(begin, piece.begin), min(end, piece.end)
            found[first - begin : last - begin] = piece.values(
                key, begun.arrays, first - piece.begin, last - piece.begin
            )

    def _begun(self, ranges: Iterable[Range]) -> Iterator[tuple[Range, BegunPiece | None]]:
        """Each range with each of its pieces, then with None.

        The last piece of each of a parameter's keys is kept for the next ranges.
        """
        last: dict[str, BegunPiece] = {}
        for key, begin, end in ranges:
            last = {k: each for k, each in last.items() if name_of(k) == name_of(key)}
            for piece in () if key in self.small else self._overlapping(key, begin, end):
                if piece.key not in last or last[piece.key].piece is not piece:
                    last[piece.key] = self.begin(piece)
                yield (key, begin, end), last[piece.key]
            yield (key, begin, end), None

    def _overlapping(self, key: str, begin: int, end: int) -> Iterator[StoredPiece]:
        pieces = self._pieces_of(key)
        first = bisect_right(pieces, begin, key=lambda piece: piece.end)
        for number in range(first, len(pieces)):
            if pieces[number].begin >= end:
                return
            yield pieces[number]

    def number_of(self, file: int) -> int:
        """The I/O engine's number of a file, which is opened now if it is not.

        Raises CheckpointError.
        """
        if file not in self._numbers:
            self._numbers[file] = self._open_file(self._io, file)
        return self._numbers[file]

    def begin(self, piece: StoredPiece) -> BegunPiece:
        """Starts reading a piece. Raises CheckpointError if its file cannot be opened."""
        reads = []
        for file, offset, nbytes in piece.ranges():
            begin = offset % PAGE_BYTES
            pages = round_up(begin + nbytes, PAGE_BYTES)
            memory = Arena(pages)
            op = self._io.read(self.number_of(file), memory.address, pages, offset - begin)
            array = torch.from_dlpack(memory.export(begin, nbytes))  # type: ignore[attr-defined]
            reads.append((op, array))
        return BegunPiece(piece, reads)


def ahead(items: Iterator[_T]) -> Iterator[_T]:
    """The items, of which the next ones are made before they are asked for."""
    waiting = deque(islice(items, _AHEAD))
    while waiting:
        found = waiting.popleft()
        waiting.extend(islice(items, 1))
        yield found
