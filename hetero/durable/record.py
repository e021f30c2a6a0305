"""The record of a commit: what one rank's state was, and where in its data files it lies.

docs/formats.md describes the format. A record that was cut or changed is an error.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hetero.checkpoint.manifest import Manifest, parse_manifest
from hetero.checkpoint.schema import crc_of, parse_json, typed
from hetero.chunks.dtypes import Dtypes
from hetero.state.state_files import StateFiles, is_state_file
from offload._native import StripeMap
from offload.disk.durable import check_named, sync_path, write_all
from offload.errors import CheckpointError, StoreError
from offload.memory.sizes import PAGE_BYTES

VERSION = 2  # of records, and of the other files in the folders
# Flags for a file of a state's own: no link is followed, and no other end of a pipe waited for.
OWN_FILE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_MAGIC = b"hetero\0commit\0\0\0"
_ORDER = 0x01020304  # as this machine has it: another one's bytes are in another order
# Magic, byte order, version, checksum of this page, of the rest; generation, number, rank, ranks;
# bytes of the four sections.
_HEAD = struct.Struct("=16s4I4Q4Q")
_MOST_BYTES = 1 << 40  # of a section
_PIECE_BYTES = 1 << 20  # of checksums that are in memory at once


@dataclass(frozen=True)
class StoredSlice:
    """A parameter's place in its chunk: elements [offset, offset + numel)."""

    name: str
    offset: int
    numel: int


@dataclass(frozen=True)
class StoredChunk:
    """Where a rank's shard of a chunk begins in the data file, in bytes; tiles follow each other.

    `optim_state` is None if the chunk is frozen.
    """

    slots: int
    trained: bool
    slices: tuple[StoredSlice, ...]
    param: int
    optim_state: int | None


@dataclass(frozen=True)
class StoredGroup:
    """A chunk group of one rank.

    Attributes:
        compute: dtype of parameters.
        rule: of the optimizer.
        state: dtype of the rule's states.
        tile_numel: elements of a tile.
        rank: this rank's number among those that share a chunk.
        ranks: how many these are.
        name: of the members of the data file.
        places: of the folders that have them, in the set (StateSet).
        weights: how many units of the stripes each member gets in turn (StripeMap).
        unit_bytes: of a unit.
        chunks: by their ids.
        checksums_at: where in the record's file the checksums begin: CRC-32C of each page, as
            little-endian uint32, 0 if nothing is known of the page; of all chunks one after the
            other the parameters, then the optimizer state. None if the file is not seen here.
    """

    compute: str
    rule: str
    state: str
    tile_numel: int
    rank: int
    ranks: int
    name: str
    places: tuple[int, ...]
    weights: tuple[int, ...]
    unit_bytes: int
    chunks: tuple[StoredChunk, ...]
    checksums_at: int | None = field(default=None, compare=False)

    @property
    def dtypes(self) -> Dtypes:
        """Those that say how tiles are laid out."""
        names: Any = (self.compute, self.compute, self.rule, self.state)  # checked by decode()
        return Dtypes(*names)

    @property
    def param_bytes(self) -> int:
        """Of a tile's parameters."""
        return self.tile_numel * self.dtypes.param_bytes

    @property
    def optim_state_bytes(self) -> int:
        """Of a tile's optimizer state."""
        return self.dtypes.optim_state_bytes(self.tile_numel)

    def extents(self) -> Iterable[tuple[StoredChunk, int, int]]:
        """Each chunk's extents, offset and bytes, in the order of the checksums."""
        for chunk in self.chunks:
            yield chunk, chunk.param, chunk.slots * self.param_bytes
            if chunk.optim_state is not None:
                yield chunk, chunk.optim_state, chunk.slots * self.optim_state_bytes

    @property
    def checksum_bytes(self) -> int:
        """Of the checksums of all extents."""
        return sum(nbytes // PAGE_BYTES * 4 for _, _, nbytes in self.extents())

    def pieces(self) -> Iterator[tuple[StoredChunk, int, int]]:
        """The extents in parts, as extents(), whose checksums take little memory each."""
        most = _PIECE_BYTES // 4 * PAGE_BYTES
        for chunk, offset, nbytes in self.extents():
            for at in range(0, nbytes, most):
                yield chunk, offset + at, min(most, nbytes - at)


@dataclass(frozen=True)
class Record:
    """What one rank has of a commit.

    Attributes:
        generation: of the start that made it.
        number: of the commit, from 1 in each generation.
        rank: this rank's, of all `ranks` of the training.
        manifest: as of a checkpoint, without files; `ranks` has this rank's data alone.
        groups: the chunk groups.
        small: buffers, and tensors that this rank alone has, by the manifest's keys.
        path: the file that it was read from.
        folders: those of the set by place, where they are now.
    """

    generation: int
    number: int
    rank: int
    ranks: int
    manifest: Manifest = field(repr=False)
    groups: tuple[StoredGroup, ...] = field(repr=False)
    small: Mapping[str, torch.Tensor] = field(repr=False)
    path: str = field(default="", compare=False)
    folders: tuple[str, ...] = field(default=(), compare=False)


def write(
    record: Record, checksums: Callable[[StoredGroup], Iterable[bytes]], descriptor: int
) -> None:
    """Writes the record to a file, over what it has, and returns when it is durable.

    `checksums` gives those of a group, in pieces. Neither they nor the record are ever in memory as
    a whole. Raises OSError.
    """
    before, after = _texts(record), [_bytes_of(tensor) for tensor in record.small.values()]
    sizes = [
        *map(len, before),
        sum(group.checksum_bytes for group in record.groups),
        sum(map(len, after)),
    ]
    crc, at, waiting = 0, PAGE_BYTES, bytearray()
    of_groups = (piece for group in record.groups for piece in checksums(group))
    contents: Iterable[bytes | memoryview] = chain(before, of_groups, after)
    for content in contents:
        for begin in range(0, len(content), _PIECE_BYTES):
            piece = memoryview(content)[begin : begin + _PIECE_BYTES]
            crc = crc_of(piece, crc)
            waiting += piece
            if len(waiting) >= _PIECE_BYTES:
                write_all(descriptor, waiting, at)
                at, waiting = at + len(waiting), bytearray()
    write_all(descriptor, waiting + bytes(-sum(sizes) % PAGE_BYTES), at)
    head = _sealed_head(crc, (record.generation, record.number, record.rank, record.ranks), sizes)
    write_all(descriptor, head, 0)
    os.fsync(descriptor)


class RecordFiles:
    """The two files of a rank's commit records, which have the same one, one after the other.

    So one is whole at any time.
    """

    def __init__(self, files: StateFiles) -> None:
        """Makes no file yet."""
        self._files = files
        self._open: dict[Path, int] = {}
        self.folder = Path(files.folders[0])

    def write(
        self, copy: int, record: Record, checksums: Callable[[StoredGroup], Iterable[bytes]]
    ) -> None:
        """Returns when a copy of the record is durable; the other copy is not touched.

        Raises StoreError.
        """
        path = self._files.record_path(copy)
        try:
            is_new = path not in self._open
            if is_new:
                for folder in self._files.folders:  # which have the data files' names, first
                    sync_path(Path(folder))
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
                self._open[path] = os.open(path, flags | OWN_FILE, 0o600)
            write(record, checksums, self._open[path])
            if is_new:
                sync_path(self.folder)
        except OSError as error:
            raise StoreError(
                error.errno, f"the commit's record cannot be written: {error.strerror}", str(path)
            ) from error
        check_named(self._open[path], path)

    def close(self) -> None:
        """Closes the files; idempotent."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


def _texts(record: Record) -> list[bytes]:
    """The first two sections."""
    groups = [
        {name: value for name, value in asdict(group).items() if name != "checksums_at"}
        for group in record.groups
    ]
    content = {"groups": groups, "small": list(record.small)}
    return [record.manifest.to_json(), json.dumps(content, allow_nan=False).encode()]


def _sealed_head(crc: int, numbers: Iterable[int], sizes: Iterable[int]) -> bytes:
    """The first page, with its own checksum."""
    all_numbers = (*numbers, *sizes)
    return _head(crc_of(_head(0, crc, *all_numbers)), crc, *all_numbers)


def _head(own_crc: int, crc: int, *numbers: int) -> bytes:
    packed = _HEAD.pack(_MAGIC, _ORDER, VERSION, own_crc, crc, *numbers)
    return packed.ljust(PAGE_BYTES, b"\0")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


class OtherFormatError(CheckpointError):
    """A file is of another version of the format, or of another kind of machine."""


def later_version(where: str, version: int) -> OtherFormatError:
    """The error for a file of this version."""
    how = "a later one" if version > VERSION else "an earlier one"
    return OtherFormatError(
        f"{where} is of version {version} of the format, {how}, and this hetero reads version "
        f"{VERSION}; use the hetero that wrote it, and save a checkpoint there (hetero.save)"
    )


def read_record(path: str, folders: tuple[str, ...]) -> Record | None:
    """The record in a file; None if none was ever written to it. `folders` are those of its set.

    Raises CheckpointError as decode(), StoreError if it cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | OWN_FILE)
        with open(descriptor, "rb") as stream:
            record = decode(stream, path)
    except OSError as error:
        raise StoreError(error.errno, f"cannot be read: {error.strerror}", path) from error
    return None if record is None else replace(record, path=path, folders=folders)


def decode(stream: BinaryIO, where: str) -> Record | None:
    """The record that the file `where` has; None if none was ever written to it.

    Raises OtherFormatError if it is of another version or byte order, CheckpointError if it is
    damaged or cut off.
    """
    nbytes = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    head = stream.read(PAGE_BYTES)
    if not any(head):
        return None
    if len(head) < PAGE_BYTES:
        raise CheckpointError(f"{where} has {nbytes} bytes, and a record has a page at least")
    magic, order, version, own_crc, crc, *numbers = _HEAD.unpack_from(head)
    if magic != _MAGIC:
        raise CheckpointError(f"{where} is no record of a commit")
    if order != _ORDER:
        raise OtherFormatError(
            f"{where} is of a machine with another byte order, whose state this one cannot read"
        )
    if version != VERSION:
        raise later_version(where, version)
    if crc_of(_head(0, crc, *numbers)) != own_crc or any(head[_HEAD.size :]):
        raise CheckpointError(f"{where} is damaged: the checksum of its first page is another one")
    generation, number, rank, ranks, *sizes = numbers
    total = PAGE_BYTES + sum(sizes)
    if max(sizes) > _MOST_BYTES or total > nbytes:
        raise CheckpointError(f"{where} has {nbytes} bytes of {total}: it was cut off")
    manifest_text, text = stream.read(sizes[0]), stream.read(sizes[1])
    found_crc, checksums_at = crc_of(text, crc_of(manifest_text)), stream.tell()
    for at in range(0, sizes[2], _PIECE_BYTES):
        found_crc = crc_of(stream.read(min(_PIECE_BYTES, sizes[2] - at)), found_crc)
    small = stream.read(sizes[3])
    if crc_of(small, found_crc) != crc:
        raise CheckpointError(f"{where} is damaged, or was not written to its end")
    manifest = parse_manifest(manifest_text, f"the manifest in {where}")
    fields: _Fields = typed(_Fields, parse_json(text, where), where)
    if not 0 <= rank < ranks or number < 1 or generation < 1 or len(manifest.ranks) != 1:
        raise CheckpointError(f"{where} is of rank {rank} of {ranks} and commit {number}")
    try:
        groups = _with_checksums(fields.groups, checksums_at, sizes[2])
        tensors = _small(fields.small, manifest, small)
        _check_names(groups, manifest, tensors)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {str(error)[:300]}"
        raise CheckpointError(f"{where} is not as hetero writes it: {what}") from None
    return Record(generation, number, rank, ranks, manifest, groups, tensors)


@dataclass(frozen=True)
class _Fields:
    """The second section."""

    groups: tuple[StoredGroup, ...]
    small: tuple[str, ...]


def _with_checksums(
    groups: Iterable[StoredGroup], begin: int, nbytes: int
) -> tuple[StoredGroup, ...]:
    """The groups, whose checksums are `nbytes` from `begin` on. Raises ValueError and others."""
    found, at = [], begin
    for group in groups:
        StripeMap(group.weights, group.unit_bytes)
        if not is_state_file(group.name) or "/" in group.name or group.tile_numel < 1:
            raise ValueError(f"a data file {group.name[:80]!r} with tiles of {group.tile_numel}")
        found.append(replace(group, checksums_at=at))
        at += group.checksum_bytes
    if at != begin + nbytes:
        raise ValueError(f"{nbytes} bytes of checksums, and its pages have {at - begin}")
    return tuple(found)


def _small(keys: Iterable[str], manifest: Manifest, content: bytes) -> dict[str, torch.Tensor]:
    """The tensors whose bytes follow one another. Raises LookupError, ValueError."""
    records = {key: manifest.tensors[key] for key in keys}
    sizes = [record.numel * record.dtype.itemsize for record in records.values()]
    if sum(sizes) != len(content):
        raise ValueError(f"{len(content)} bytes of small tensors, which have {sum(sizes)}")
    # (Of one byte more: torch makes no tensor of nothing.)
    parts = torch.frombuffer(bytearray(content + b"\0"), dtype=torch.uint8)[:-1].split(sizes)
    each = zip(records.items(), parts, strict=True)
    return {key: part.clone().view(r.dtype).view(r.shape) for (key, r), part in each}


def _check_names(
    groups: Iterable[StoredGroup], manifest: Manifest, small: Mapping[str, torch.Tensor]
) -> None:
    """Raises ValueError unless each parameter has a place, and each buffer a value."""
    placed = {each.name for group in groups for chunk in group.chunks for each in chunk.slices}
    wanted = {name for name in manifest.params if manifest.tensors[f"model/{name}"].numel}
    missing = [*(wanted - placed), *(n for n in manifest.buffers if f"model/{n}" not in small)]
    if missing or placed - set(manifest.params):
        raise ValueError(f"no place of {sorted(missing)[:3]}, or one of unknown parameters")
