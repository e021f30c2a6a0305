"""Reads pieces of a checkpoint's data files ahead of their use, and verifies each."""

from __future__ import annotations

import os
import stat
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from hetero.checkpoint.data_writer import CHECKSUMS, PADDING, WrittenFile, open_direct
from hetero.checkpoint.manifest import TensorRecord
from hetero.checkpoint.safetensors_header import MAX_HEADER_BYTES, Header, read
from offload._native import IoOp, NativeIoError, crc32c
from offload.disk.scratch_file import make_io_engine
from offload.errors import CheckpointError
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.sizes import PAGE_BYTES, round_up
from offload.memory.tiers import Account

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
        self._resources = ExitStack()
        self._cache: OrderedDict[tuple[str, int], torch.Tensor] = OrderedDict()
        self._order: Iterator[StoredPiece] = iter(())
        self._ahead: deque[tuple[StoredPiece, int, IoOp]] = deque()
        try:
            self._open(files, io_engine)
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
            if _crc_of(head) != written.header_crc32c:
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

    def _open(self, files: Iterable[str], io_engine: str) -> None:
        self._io, _ = make_io_engine(io_engine)
        self._resources.callback(self._io.close)
        self._file_numbers = {}
        for name in files:
            path = self._folder / name
            descriptor = open_direct(path, os.O_RDONLY)
            try:
                self._file_numbers[name] = self._io.add_file(descriptor, str(path))
            finally:
                os.close(descriptor)
        largest = max((p.nbytes for some in self._pieces.values() for p in some), default=0)
        # (One page more: a piece may begin and end inside pages.)
        self._slot_bytes = min(round_up(largest, PAGE_BYTES) + PAGE_BYTES, _SLOT_BYTES)
        self._arena = HostArena(_AHEAD, self._slot_bytes, Ledger({}), Account.BUFFER)
        self._resources.callback(self._arena.close)
        self._arena.commit(0, _AHEAD)
        self._io.register(self._arena.memory)
        self._free = list(range(_AHEAD))

    def expect(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """read() is going to be called with these ranges, in this order: they are read ahead."""
        assert not self._ahead
        self._order = self._pieces_in(ranges)
        self._read_ahead()

    def _pieces_in(self, ranges: Iterable[tuple[str, int, int]]) -> Iterator[StoredPiece]:
        last: dict[str, StoredPiece] = {}
        for key, begin, end in ranges:
            for piece in self._overlapping(key, begin, end):
                if last.get(key) is not piece:
                    last = {k: p for k, p in last.items() if _same_param(k, key)}
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

    def _read_ahead(self) -> None:
        while self._free:
            piece = next(self._order, None)
            if piece is None:
                return
            self._ahead.append(self._start(piece))

    def _start(self, piece: StoredPiece, done: int = 0) -> tuple[StoredPiece, int, IoOp]:
        """Reads the piece from byte `done` on, as much as a slot takes."""
        slot = self._free.pop()
        begin = (piece.offset + done) & -PAGE_BYTES
        nbytes = min(round_up(piece.offset + piece.nbytes, PAGE_BYTES) - begin, self._slot_bytes)
        operation = self._io.read(
            self._file_numbers[piece.file], self._arena.address(slot), nbytes, begin
        )
        return piece, slot, operation

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

    def _take(self, wanted: StoredPiece) -> torch.Tensor:
        """The piece's values, read ahead or now."""
        if self._ahead and self._ahead[0][0] is wanted:
            piece, slot, operation = self._ahead.popleft()
        else:
            if not self._free:  # what was expected did not come: it is read again if it does
                _, slot, operation = self._ahead.pop()
                with suppress(NativeIoError):
                    operation.wait()
                self._free.append(slot)
            piece, slot, operation = self._start(wanted)
        values = torch.empty(piece.nbytes, dtype=torch.uint8)
        done = self._copy(piece, slot, operation, values, 0)
        while done < piece.nbytes:
            _, slot, operation = self._start(piece, done)
            done = self._copy(piece, slot, operation, values, done)
        self._read_ahead()
        if crc32c(values.data_ptr(), piece.nbytes) != piece.crc32c:
            raise CheckpointError(
                f"elements {piece.begin} to {piece.end} of {piece.key!r} are damaged in "
                f"{self._folder / piece.file}: their checksum is not {piece.crc32c:08x}; the disk, "
                f"or a copy, has changed bytes; load another checkpoint"
            )
        return values.view(self._tensors[piece.key].dtype)

    def _copy(
        self, piece: StoredPiece, slot: int, operation: IoOp, values: torch.Tensor, done: int
    ) -> int:
        """Waits, frees the slot, and returns how many bytes of the piece are in `values`."""
        try:
            operation.wait()
            inside = (piece.offset + done) % PAGE_BYTES
            size = min(piece.nbytes - done, self._slot_bytes - inside)
            stored = self._arena.view(slot, 1, torch.uint8)[inside : inside + size]
            values[done : done + size] = stored
            del stored
        except NativeIoError as error:
            raise CheckpointError(
                f"elements {piece.begin} to {piece.end} of {piece.key!r} cannot be read from "
                f"{self._folder / piece.file}: {error}"
            ) from error
        finally:
            self._free.append(slot)
        return done + size

    def pieces(self) -> list[StoredPiece]:
        """All pieces, in the order of the files."""
        found = [piece for some in self._pieces.values() for piece in some]
        return sorted(found, key=lambda piece: (piece.file, piece.offset))

    def verify(self) -> Iterator[StoredPiece]:
        """Reads everything and yields each piece that is good. Raises as read()."""
        pieces = self.pieces()
        self._order = iter(pieces)
        self._read_ahead()
        for piece in pieces:
            self._take(piece)
            yield piece

    def close(self) -> None:
        """Waits for what is under way, and closes all files; idempotent."""
        for _, _, operation in self._ahead:
            with suppress(NativeIoError):
                operation.wait()
        self._ahead.clear()
        self._resources.close()


def _number(digits: str) -> int | None:
    """The number; None if it is none that counts elements."""
    return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) < 20 else None


def _same_param(key: str, other: str) -> bool:
    return _param_of(key) == _param_of(other)


def _param_of(key: str) -> str:
    """The parameter's name in "model/NAME" and "optimizer/NAME/STATE"."""
    kind, _, rest = key.partition("/")
    return rest.rpartition("/")[0] if kind == "optimizer" else rest


def _checksums(path: Path, header: Header) -> list[int]:
    text = header.metadata.get(CHECKSUMS, "")
    if len(text) != 8 * len(header.entries) or not set(text) <= set("0123456789abcdef"):
        raise CheckpointError(f"{path} has no checksum of each tensor in its header")
    return [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]


def _crc_of(content: bytes) -> int:
    memory = torch.frombuffer(bytearray(content) or bytearray(1), dtype=torch.uint8)
    return crc32c(memory.data_ptr(), len(content))
