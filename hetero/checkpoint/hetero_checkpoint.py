"""Reads hetero's own checkpoints: pieces, ahead of their use, and verifies each."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from hetero.checkpoint.data_writer import CHECKSUMS, PADDING, WrittenFile
from hetero.checkpoint.manifest import read_manifest
from hetero.checkpoint.piece_reader import FileRange, PieceCheckpoint, StoredPiece, ahead
from hetero.checkpoint.safetensors_header import MAX_HEADER_BYTES, Header, read
from hetero.checkpoint.schema import crc_of
from offload._native import IoEngine, crc32c
from offload.disk.file_member import open_direct
from offload.errors import CheckpointError
from offload.memory.sizes import PAGE_BYTES


@dataclass(frozen=True, slots=True)
class DataPiece(StoredPiece):
    """A piece that is an entry of a data file: of a dtype, `range.nbytes` with a checksum."""

    dtype: torch.dtype
    path: Path
    range: FileRange
    crc32c: int

    def ranges(self) -> list[FileRange]:
        """See StoredPiece."""
        return [self.range]

    def check(self, arrays: Sequence[torch.Tensor]) -> None:
        """See StoredPiece."""
        (array,) = arrays
        if crc32c(array.data_ptr(), len(array)) != self.crc32c:
            raise CheckpointError(
                f"{self.where} are damaged in {self.path}: their checksum is not "
                f"{self.crc32c:08x}; the disk, or a copy, has changed bytes; load another "
                f"checkpoint"
            )

    def values(
        self, key: str, arrays: Sequence[torch.Tensor], begin: int, end: int
    ) -> torch.Tensor:
        """See StoredPiece."""
        return arrays[0].view(self.dtype)[begin:end]


class HeteroCheckpoint(PieceCheckpoint):
    """What hetero.save() has written."""

    kind = "hetero checkpoint"

    def __init__(self, path: Path, io_engine: str = "auto") -> None:
        """Reads the manifest; `io_engine` is as in Config. Raises CheckpointError."""
        super().__init__(path, io_engine)
        self.manifest = read_manifest(path)
        self.files = {name: file.nbytes for name, file in self.manifest.files.items()}

    def open(self) -> None:
        """See StoredCheckpoint: reads the headers of all files."""
        _ = self._pieces
        for file in range(len(self.files)):
            self.number_of(file)

    def _open_file(self, io: IoEngine, file: int) -> int:
        path = self.path / [*self.files][file]
        try:
            descriptor, _ = open_direct(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error
        try:
            return io.add_file(descriptor, str(path))
        finally:
            os.close(descriptor)

    def _pieces_of(self, key: str) -> Sequence[DataPiece]:
        return self._pieces[key]

    @cached_property
    def _pieces(self) -> dict[str, list[DataPiece]]:
        """By key, in order. Raises CheckpointError if some are missing, or overlap."""
        found: dict[str, list[DataPiece]] = {key: [] for key in self.manifest.tensors}
        for number, (name, written) in enumerate(self.manifest.files.items()):
            for piece in self._pieces_in(self.path / name, number, written):
                found[piece.key].append(piece)
        for key, pieces in found.items():
            pieces.sort(key=lambda piece: piece.begin)
            self._require_whole(key, pieces)
        return found

    def _pieces_in(self, path: Path, number: int, written: WrittenFile) -> Iterator[DataPiece]:
        """The pieces in a file. Raises CheckpointError if it is not as it was written."""
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
                place, end = FileRange(number, offset, nbytes), begin + entry.shape[0]
                yield DataPiece(key, begin, end, entry.dtype, path, place, crc)

    def _require_whole(self, key: str, pieces: list[DataPiece]) -> None:
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

    def verify(self) -> Iterator[tuple[int, CheckpointError | None]]:
        """Reads every piece, in the order of the files; yields its bytes, and what is wrong with
        it.

        Raises CheckpointError if the files are not those that the manifest says.
        """
        pieces = [piece for some in self._pieces.values() for piece in some]
        pieces.sort(key=lambda piece: piece.range)
        for begun in ahead(map(self.begin, pieces)):
            error: CheckpointError | None = None
            try:
                _ = begun.arrays
            except CheckpointError as failure:
                error = failure
            yield sum(each.nbytes for each in begun.piece.ranges()), error


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
