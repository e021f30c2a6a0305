"""Reads pieces of a checkpoint's data files ahead of their use, and verifies each."""

from __future__ import annotations

import os
import stat
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from hetero.checkpoint.checksum import crc_of
from hetero.checkpoint.data_writer import CHECKSUMS, PADDING, WrittenFile, open_direct
from hetero.checkpoint.manifest import TensorRecord
from hetero.checkpoint.model_tensors import name_of
from hetero.checkpoint.piece_reader import FileRange, FileRanges, PieceReader
from hetero.checkpoint.safetensors_header import MAX_HEADER_BYTES, Header, read
from offload._native import NativeIoError, crc32c
from offload.errors import CheckpointError
from offload.memory.sizes import PAGE_BYTES, round_up

_AHEAD = 8  # pieces
_SLOT_BYTES = 8 << 20  # what is larger, a large buffer of the model's, is read in parts
_CACHED = 8  # pieces: the last ones of a parameter's master and states


@dataclass(frozen=True)
class StoredPiece:
    """Elements [begin, end) of the flat tensor `key`, at bytes of a data file."""

    key: str
    begin: int
    end: int
    file: str
    offset: int
    nbytes: int
    crc32c: int


class DataReader:
    """The data files of a checkpoint, opened for reading; close() it."""

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, WrittenFile],
        tensors: Mapping[str, TensorRecord],
        io_engine: str,
    ) -> None:
        """Opens all files and reads their headers.

        Raises:
            CheckpointError: a file is missing or not as it was written, or pieces of a tensor are
                missing, or overlap.
            StoreError: a file cannot be opened.
        """
        self._tensors = tensors
        self._pieces: dict[str, list[StoredPiece]] = {key: [] for key in tensors}
        self._folder = folder
        for name, written in files.items():
            self._index(name, written)
        for key, pieces in self._pieces.items():
            pieces.sort(key=lambda piece: piece.begin)
            self._require_whole(key, pieces)
        self._cache: OrderedDict[tuple[str, int], torch.Tensor] = OrderedDict()
        largest = max((p.nbytes for some in self._pieces.values() for p in some), default=0)
        # (One page more: a piece may begin and end inside pages.)
        slot_bytes = min(round_up(largest, PAGE_BYTES) + PAGE_BYTES, _SLOT_BYTES)
        self._reader = PieceReader(io_engine, _AHEAD, slot_bytes, all_used=True)
        self._file_numbers: dict[str, int] = {}
        try:
            for name in files:
                self._open(name)
        except BaseException:
            self.close()
            raise

    def _index(self, name: str, written: WrittenFile) -> None:
        path = self._folder / name
        try:
            status = path.stat()
            # (Opening a pipe would wait for a writer.)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path} is not a regular file")
            found = status.st_size
            if found != written.nbytes or found % PAGE_BYTES:
                raise CheckpointError(
                    f"{path} has {found} bytes, and the checkpoint was written with "
                    f"{written.nbytes}"
                )
            with path.open("rb") as stream:
                head = stream.read(min(written.header_nbytes, found, 2 * MAX_HEADER_BYTES))
            if crc_of(head) != written.header_crc32c:
                raise CheckpointError(
                    f"{path} is damaged: the checksum of its header is another one"
                )
            header = read(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if header.data_offset != written.header_nbytes:
            raise CheckpointError(
                f"{path} has a header of {header.data_offset} bytes, and the checkpoint was "
                f"written with {written.header_nbytes}"
            )
        crcs = _checksums(path, header)
        for (entry_name, entry), crc in zip(header.entries.items(), crcs, strict=True):
            if entry_name.startswith(PADDING):
                continue
            key, _, begin_text = entry_name.rpartition("@")
            record = self._tensors.get(key)
            begin = _number(begin_text)
            if record is None or begin is None:
                raise CheckpointError(f"{path} has {entry_name!r}, of which the manifest knows not")
            if entry.dtype != record.dtype or len(entry.shape) != 1:
                raise CheckpointError(
                    f"{path} has {entry_name!r} of {entry.dtype} and shape {entry.shape}, and the "
                    f"manifest says {record.dtype}"
                )
            if not entry.shape[0]:
                continue
            self._pieces[key].append(
                StoredPiece(
                    key,
                    begin,
                    begin + entry.shape[0],
                    name,
                    header.data_offset + entry.begin,
                    entry.end - entry.begin,
                    crc,
                )
            )

    def _require_whole(self, key: str, pieces: list[StoredPiece]) -> None:
        at, numel = 0, self._tensors[key].numel
        for piece in pieces:
            if piece.begin != at:
                what = "are missing" if piece.begin > at else "are there twice"
                raise CheckpointError(
                    f"elements {min(at, piece.begin)} to {max(at, piece.begin)} of {key!r} {what} "
                    f"in {self._folder}"
                )
            at = piece.end
        if at != numel:
            raise CheckpointError(
                f"{self._folder} has {at} elements of {key!r}, and the manifest says {numel}"
            )

    def _open(self, name: str) -> None:
        path = self._folder / name
        descriptor = open_direct(path, os.O_RDONLY)
        try:
            self._file_numbers[name] = self._reader.io.add_file(descriptor, str(path))
        finally:
            os.close(descriptor)

    def expect(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """read() is going to be called with these ranges, in this order: they are read ahead."""
        pieces = self._pieces_in(ranges)
        self._reader.expect(part for piece in pieces for part in self._parts(piece))

    def _pieces_in(self, ranges: Iterable[tuple[str, int, int]]) -> Iterator[StoredPiece]:
        last: dict[str, StoredPiece] = {}
        for key, begin, end in ranges:
            for piece in self._overlapping(key, begin, end):
                if last.get(key) is not piece:
                    last = {k: p for k, p in last.items() if name_of(k) == name_of(key)}
                    last[key] = piece
                    yield piece

    def _overlapping(self, key: str, begin: int, end: int) -> list[StoredPiece]:
        pieces = self._pieces[key]
        first = bisect_right(pieces, begin, key=lambda piece: piece.end)
        found = []
        for piece in pieces[first:]:
            if piece.begin >= end:
                break
            found.append(piece)
        return found

    def _parts(self, piece: StoredPiece) -> Iterator[FileRanges]:
        """The piece as what slots take."""
        file, at, end = self._file_numbers[piece.file], piece.offset, piece.offset + piece.nbytes
        while at < end:
            stop = min(end, (at & -PAGE_BYTES) + self._reader.slot_bytes)
            yield (FileRange(file, at, stop - at),)
            at = stop

    def read(self, key: str, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end) of a tensor, flat, in the dtype that is stored.

        Raises:
            CheckpointError: their checksum is another one, or they cannot be read.
        """
        assert 0 <= begin <= end <= self._tensors[key].numel, (key, begin, end)
        found = torch.empty(end - begin, dtype=self._tensors[key].dtype)
        for piece in self._overlapping(key, begin, end):
            first, last = max(begin, piece.begin), min(end, piece.end)
            values = self._values(piece)
            found[first - begin : last - begin] = values[first - piece.begin : last - piece.begin]
        return found

    def whole(self, key: str) -> torch.Tensor:
        """A tensor, in its shape. Raises as read()."""
        record = self._tensors[key]
        return self.read(key, 0, record.numel).view(record.shape)

    def _values(self, piece: StoredPiece) -> torch.Tensor:
        place = (piece.key, piece.begin)
        values = self._cache.get(place)
        if values is None:
            values = self._cache[place] = self._take(piece)
            if len(self._cache) > _CACHED:
                self._cache.popitem(last=False)
        self._cache.move_to_end(place)
        return values

    def _take(self, piece: StoredPiece) -> torch.Tensor:
        """The piece's values. Raises CheckpointError."""
        where = f"elements {piece.begin} to {piece.end} of {piece.key!r}"
        path = self._folder / piece.file
        values, done = torch.empty(piece.nbytes, dtype=torch.uint8), 0
        try:
            for part in self._parts(piece):
                (stored,) = self._reader.read(part)
                values[done : done + len(stored)] = stored
                done += len(stored)
        except NativeIoError as error:
            raise CheckpointError(f"{where} cannot be read from {path}: {error}") from error
        if crc32c(values.data_ptr(), piece.nbytes) != piece.crc32c:
            raise CheckpointError(
                f"{where} are damaged in {path}: their checksum is not {piece.crc32c:08x}; the "
                f"disk, or a copy, has changed bytes; load another checkpoint"
            )
        return values.view(self._tensors[piece.key].dtype)

    def pieces(self) -> list[StoredPiece]:
        """All pieces, in the order of the files."""
        found = [piece for some in self._pieces.values() for piece in some]
        return sorted(found, key=lambda piece: (piece.file, piece.offset))

    def verify(self) -> Iterator[tuple[StoredPiece, CheckpointError | None]]:
        """Reads every piece; yields each, and what is wrong with it."""
        pieces = self.pieces()
        self._reader.expect(part for piece in pieces for part in self._parts(piece))
        for piece in pieces:
            try:
                self._take(piece)
            except CheckpointError as error:
                yield piece, error
            else:
                yield piece, None

    def close(self) -> None:
        """Waits for what is under way, and closes all files; idempotent."""
        self._reader.close()


def _number(digits: str) -> int | None:
    """The number; None if it is none that counts elements."""
    return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) < 20 else None


def _checksums(path: Path, header: Header) -> list[int]:
    text = header.metadata.get(CHECKSUMS, "")
    if len(text) != 8 * len(header.entries) or not set(text) <= set("0123456789abcdef"):
        raise CheckpointError(f"{path} has no checksum of each tensor in its header")
    return [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
