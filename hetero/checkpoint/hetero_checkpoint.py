"""Reads hetero's own checkpoints: pieces, ahead of their use, and verifies each."""

from __future__ import annotations

import os
import stat
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import tee
from pathlib import Path

import torch

from hetero.checkpoint.data_writer import CHECKSUMS, PADDING, Range, WrittenFile, open_direct
from hetero.checkpoint.manifest import name_of, read_manifest
from hetero.checkpoint.piece_reader import FileRange, FileRanges, PieceReader
from hetero.checkpoint.safetensors_header import MAX_HEADER_BYTES, Header, read
from hetero.checkpoint.schema import crc_of
from hetero.checkpoint.stored_checkpoint import StoredCheckpoint
from offload._native import NativeIoError, crc32c
from offload.errors import CheckpointError, StoreError
from offload.memory.sizes import PAGE_BYTES, round_up

_AHEAD = 8  # pieces
_SLOT_BYTES = 8 << 20  # what is larger, a large buffer of the model's, is read in parts


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


class HeteroCheckpoint(StoredCheckpoint):
    """What hetero.save() has written."""

    kind = "hetero checkpoint"

    def __init__(self, path: Path, io_engine: str = "auto") -> None:
        """Reads the manifest; `io_engine` is as in Config. Raises CheckpointError."""
        super().__init__(path)
        self.manifest = read_manifest(path)
        self.files = {name: file.nbytes for name, file in self.manifest.files.items()}
        self._io_engine = io_engine
        self._file_numbers: dict[str, int] = {}

    def open(self) -> None:
        """See StoredCheckpoint: reads the headers of all files."""
        _ = self._reader

    @cached_property
    def _pieces(self) -> dict[str, list[StoredPiece]]:
        """By key, in order. Raises CheckpointError if some are missing, or overlap."""
        found: dict[str, list[StoredPiece]] = {key: [] for key in self.manifest.tensors}
        for name, written in self.manifest.files.items():
            for piece in self._pieces_of(name, written):
                found[piece.key].append(piece)
        for key, pieces in found.items():
            pieces.sort(key=lambda piece: piece.begin)
            self._require_whole(key, pieces)
        return found

    @cached_property
    def _reader(self) -> PieceReader:
        """Has all files. Raises CheckpointError."""
        largest = max((p.nbytes for some in self._pieces.values() for p in some), default=0)
        # (One page more: a piece may begin and end inside pages.)
        slot_bytes = min(round_up(largest, PAGE_BYTES) + PAGE_BYTES, _SLOT_BYTES)
        made = PieceReader(self._io_engine, _AHEAD, slot_bytes, all_used=True)
        try:
            for name in self.manifest.files:
                path = self.path / name
                descriptor = open_direct(path, os.O_RDONLY)
                try:
                    self._file_numbers[name] = made.io.add_file(descriptor, str(path))
                finally:
                    os.close(descriptor)
        except StoreError as error:
            made.close()
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error
        except BaseException:
            made.close()
            raise
        return made

    def _pieces_of(self, name: str, written: WrittenFile) -> Iterator[StoredPiece]:
        """The pieces in a file. Raises CheckpointError if it is not as it was written."""
        path = self.path / name
        header = _header_of(path, written)
        crcs = _checksums(path, header)
        for (entry_name, entry), crc in zip(header.entries.items(), crcs, strict=True):
            if entry_name.startswith(PADDING):
                continue
            key, _, begin_text = entry_name.rpartition("@")
            record, begin = self.manifest.tensors.get(key), _number(begin_text)
            if record is None or begin is None:
                raise CheckpointError(f"{path} has {entry_name!r}, of which the manifest knows not")
            if entry.dtype != record.dtype or len(entry.shape) != 1:
                raise CheckpointError(
                    f"{path} has {entry_name!r} of {entry.dtype} and shape {entry.shape}, and the "
                    f"manifest says {record.dtype}"
                )
            if entry.shape[0]:
                offset, nbytes = header.data_offset + entry.begin, entry.end - entry.begin
                yield StoredPiece(key, begin, begin + entry.shape[0], name, offset, nbytes, crc)

    def _require_whole(self, key: str, pieces: list[StoredPiece]) -> None:
        at, numel = 0, self.manifest.tensors[key].numel
        for piece in pieces:
            if piece.begin != at:
                what = "are missing" if piece.begin > at else "are there twice"
                raise CheckpointError(
                    f"elements {min(at, piece.begin)} to {max(at, piece.begin)} of {key!r} {what} "
                    f"in {self.path}"
                )
            at = piece.end
        if at != numel:
            raise CheckpointError(
                f"{self.path} has {at} elements of {key!r}, and the manifest says {numel}"
            )

    def values(self, order: Iterable[Sequence[Range]]) -> Iterator[tuple[str, int, torch.Tensor]]:
        """See StoredCheckpoint; checksums are verified."""
        ahead, steps = tee(self._steps(each for chunk in order for each in chunk))
        read = self._checked(piece for _, pieces in ahead for piece, is_new in pieces if is_new)
        held: dict[str, torch.Tensor] = {}
        for (key, begin, end), pieces in steps:
            found = torch.empty(end - begin, dtype=self.manifest.tensors[key].dtype)
            for piece, is_new in pieces:
                if is_new:
                    held = {k: v for k, v in held.items() if name_of(k) == name_of(key)}
                    _, held[key], error = next(read)
                    if error is not None:
                        raise error
                first, last = max(begin, piece.begin), min(end, piece.end)
                values = held[key][first - piece.begin : last - piece.begin]
                found[first - begin : last - begin] = values
            yield key, begin, found

    def _steps(
        self, ranges: Iterable[Range]
    ) -> Iterator[tuple[Range, list[tuple[StoredPiece, bool]]]]:
        """Of each range the pieces that have it, and whether they are read for it.

        The last piece of each of a parameter's keys is kept for the next ranges.
        """
        last: dict[str, StoredPiece] = {}
        for key, begin, end in ranges:
            pieces = []
            for piece in self._overlapping(key, begin, end):
                pieces.append((piece, last.get(key) is not piece))
                last = {k: p for k, p in last.items() if name_of(k) == name_of(key)}
                last[key] = piece
            yield (key, begin, end), pieces

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

    def _checked(
        self, pieces: Iterable[StoredPiece]
    ) -> Iterator[tuple[StoredPiece, torch.Tensor, CheckpointError | None]]:
        """The pieces with their values, and what is wrong with each."""
        ahead, order = tee(pieces)
        parts = self._reader.pieces(part for piece in ahead for part in self._parts(piece))
        for piece in order:
            where = f"elements {piece.begin} to {piece.end} of {piece.key!r}"
            path, error = self.path / piece.file, None
            values, done = torch.empty(piece.nbytes, dtype=torch.uint8), 0
            for _ in self._parts(piece):
                try:
                    (stored,) = next(parts).contents()
                except NativeIoError as failure:
                    error = CheckpointError(f"{where} cannot be read from {path}: {failure}")
                else:
                    values[done : done + len(stored)] = stored
                    done += len(stored)
            if error is None and crc32c(values.data_ptr(), piece.nbytes) != piece.crc32c:
                error = CheckpointError(
                    f"{where} are damaged in {path}: their checksum is not {piece.crc32c:08x}; the "
                    f"disk, or a copy, has changed bytes; load another checkpoint"
                )
            yield piece, values.view(self.manifest.tensors[piece.key].dtype), error

    def verify(self) -> Iterator[tuple[StoredPiece, CheckpointError | None]]:
        """Reads every piece, in the order of the files; yields each, and what is wrong with it.

        Raises CheckpointError if the files are not those that the manifest says.
        """
        pieces = [piece for some in self._pieces.values() for piece in some]
        pieces.sort(key=lambda piece: (piece.file, piece.offset))
        for piece, _, error in self._checked(pieces):
            yield piece, error

    def close(self) -> None:
        """See StoredCheckpoint: waits for what is under way, and closes all files."""
        reader = self.__dict__.pop("_reader", None)
        if reader is not None:
            reader.close()


def _header_of(path: Path, written: WrittenFile) -> Header:
    """The header of a data file. Raises CheckpointError if it is not as it was written."""
    try:
        status = path.stat()
        # (Opening a pipe would wait for a writer.)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        found = status.st_size
        if found != written.nbytes or found % PAGE_BYTES:
            raise CheckpointError(
                f"{path} has {found} bytes, and the checkpoint was written with {written.nbytes}"
            )
        with path.open("rb") as stream:
            head = stream.read(min(written.header_nbytes, found, 2 * MAX_HEADER_BYTES))
        if crc_of(head) != written.header_crc32c:
            raise CheckpointError(f"{path} is damaged: the checksum of its header is another one")
        header = read(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if header.data_offset != written.header_nbytes:
        raise CheckpointError(
            f"{path} has a header of {header.data_offset} bytes, and the checkpoint was "
            f"written with {written.header_nbytes}"
        )
    return header


def _number(digits: str) -> int | None:
    """The number; None if it is none that counts elements."""
    return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) < 20 else None


def _checksums(path: Path, header: Header) -> list[int]:
    text = header.metadata.get(CHECKSUMS, "")
    if len(text) != 8 * len(header.entries) or not set(text) <= set("0123456789abcdef"):
        raise CheckpointError(f"{path} has no checksum of each tensor in its header")
    return [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
