"""The record of a commit: what one rank's state was, and where in its data files it lies.

docs/formats.md describes the format. decode() takes nothing on trust: a record that was cut,
changed or made up is an error that names what is wrong.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from hetero.checkpoint.engine_checkpoint import STATE_NAMES
from hetero.checkpoint.manifest import Manifest, parse_manifest
from hetero.checkpoint.schema import LARGEST, crc_of, member, parse_json, shortened
from hetero.chunks.dtypes import Dtypes
from hetero.state.memory.scratch_space import StateFiles, is_state_file
from offload._native import StripeMap
from offload.disk.durable import check_named, sync_path
from offload.errors import CheckpointError, StoreError
from offload.memory.sizes import PAGE_BYTES

VERSION = 2  # of records, and of the other files in the folders
_MAGIC = b"hetero\0commit\0\0\0"
_ORDER = 0x01020304  # as this machine has it: another one's bytes are in another order
# Magic, byte order, version, checksum of this page, of the rest; generation, number, rank, ranks;
# bytes of the four sections.
_HEAD = struct.Struct("=16s4I4Q4Q")
_MOST_BYTES = 1 << 40  # of a section
_PIECE_BYTES = 1 << 20  # of checksums that are in memory at once
# Of a chunk group's fields.
_CHOICES = {
    "compute": ("fp32", "bf16", "fp16"),
    "rule": tuple(STATE_NAMES),
    "state": ("fp32", "bf16", "8bit"),
}


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


def write_all(descriptor: int, content: bytes | bytearray, offset: int) -> None:
    """Writes all of it at byte `offset` of a file. Raises OSError."""
    left = memoryview(content)
    while left:
        done = os.pwrite(descriptor, left, offset)
        left, offset = left[done:], offset + done


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
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
                self._open[path] = os.open(path, flags, 0o600)
            write(record, checksums, self._open[path])
            if is_new:
                for folder in self._files.folders:
                    sync_path(Path(folder))  # the data files' names, too
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


def encode(record: Record) -> bytes:
    """The record without its checksums, for a rank that does not see its file."""
    before, small = _texts(record), b"".join(map(_bytes_of, record.small.values()))
    sections = [*before, b"", small]
    rest = b"".join(sections)
    numbers = (record.generation, record.number, record.rank, record.ranks)
    return _sealed_head(crc_of(rest), numbers, list(map(len, sections))) + rest


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
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(descriptor, "rb") as stream:
            record = decode(stream, path)
    except OSError as error:
        raise StoreError(error.errno, f"cannot be read: {error.strerror}", path) from error
    return None if record is None else replace(record, path=path, folders=folders)


def decode(stream: BinaryIO, where: str, has_checksums: bool = True) -> Record | None:
    """The record that the file `where` has; None if none was ever written to it.

    `has_checksums`: it was made by write(), not by encode(). Raises OtherFormatError if it is of
    another version or byte order, CheckpointError if it is damaged or cut off.
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
    fields = parse_json(text, where)
    groups = _groups(fields, checksums_at if has_checksums else None, sizes[2], where)
    if not 0 <= rank < ranks or number < 1 or generation < 1 or len(manifest.ranks) != 1:
        raise CheckpointError(f"{where} is of rank {rank} of {ranks} and commit {number}")
    made = Record(
        generation, number, rank, ranks, manifest, groups, _small(fields, manifest, small, where)
    )
    _check_params(made, where)
    return made


def _groups(
    content: Mapping[str, Any], checksums_at: int | None, checksum_bytes: int, where: str
) -> tuple[StoredGroup, ...]:
    """`checksums_at`: where those of all groups begin; None if they are not there."""
    found, at = [], checksums_at
    for each in member(content, "groups", tuple[StoredGroup, ...], where):
        _check_group(each, where)
        found.append(replace(each, checksums_at=at))
        at = None if at is None else at + each.checksum_bytes
    wanted = 0 if checksums_at is None else sum(group.checksum_bytes for group in found)
    if checksum_bytes != wanted:
        raise CheckpointError(
            f"{where} has {checksum_bytes} bytes of checksums, and its pages have {wanted}"
        )
    return tuple(found)


def _check_group(group: StoredGroup, where: str) -> None:
    """Raises CheckpointError if parts of it contradict each other."""
    for name, choices in _CHOICES.items():
        if getattr(group, name) not in choices:
            raise CheckpointError(
                f"{name} in {where} is {shortened(getattr(group, name))}, must be one of "
                f"{', '.join(choices)}"
            )
    if any(chunk.trained != (chunk.optim_state is not None) for chunk in group.chunks):
        raise CheckpointError(f"{where} has a chunk with optim_state that is frozen, or without")
    if not 0 < group.tile_numel <= 2**40 or group.tile_numel % 2048:
        raise CheckpointError(f"{where} has tiles of {group.tile_numel} elements")
    if not 0 <= group.rank < group.ranks <= 2**31:
        raise CheckpointError(f"{where} has the shard {group.rank} of {group.ranks}")
    if not is_state_file(group.name) or "/" in group.name:
        raise CheckpointError(f"{where} has a data file {shortened(group.name)}")
    places = group.places
    if len(places) != len(group.weights) or len(set(places)) != len(places):
        raise CheckpointError(
            f"{where} has a file in the folders {places}, and weights of {len(group.weights)}"
        )
    try:
        StripeMap(group.weights, group.unit_bytes)
    except (ValueError, TypeError) as error:  # the latter of numbers that are none of C++'s
        raise CheckpointError(f"{where} has stripes that cannot be: {error}") from None
    end = 0
    for chunk, offset, nbytes in sorted(group.extents(), key=lambda each: each[1]):
        if not 0 < chunk.slots <= 2**31 or offset % PAGE_BYTES or offset < end:
            raise CheckpointError(f"{where} has an extent at {offset}, where another one is")
        end = offset + nbytes
    if end > LARGEST:
        raise CheckpointError(f"{where} has an extent that ends at {end}")
    for chunk in group.chunks:
        end = 0
        for each in sorted(chunk.slices, key=lambda each: each.offset):
            if each.offset < end or each.numel < 1:
                raise CheckpointError(
                    f"{where} has {shortened(each.name)} where another parameter is"
                )
            end = each.offset + each.numel
        if end > chunk.slots * group.tile_numel * group.ranks:
            raise CheckpointError(f"{where} has a chunk with {end} elements, more than it holds")


def _small(
    fields: Mapping[str, Any], manifest: Manifest, content: bytes, where: str
) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    at = 0
    for key in member(fields, "small", tuple[str, ...], where):
        tensor = manifest.tensors.get(key)
        if tensor is None:
            raise CheckpointError(f"{where} has {shortened(key)}, of which its manifest knows not")
        nbytes = tensor.numel * tensor.dtype.itemsize
        if nbytes > len(content) - at:
            raise CheckpointError(f"{where} lacks bytes of {shortened(key)}")
        flat = torch.empty(tensor.numel, dtype=tensor.dtype)
        if nbytes:
            # (Copied, because a bytes object must not be written to.)
            part = np.frombuffer(content, dtype=np.uint8, count=nbytes, offset=at)
            flat.view(torch.uint8).numpy()[:] = part
        found[key] = flat.view(tensor.shape)
        at += nbytes
    if at != len(content):
        raise CheckpointError(f"{where} has {len(content) - at} bytes of small tensors too many")
    return found


def _check_params(record: Record, where: str) -> None:
    """Raises CheckpointError unless each parameter is in one chunk, as the manifest says."""
    manifest = record.manifest
    seen: set[str] = set()
    for group in record.groups:
        for chunk in group.chunks:
            for each in chunk.slices:
                param = manifest.params.get(each.name)
                if param is None or each.name in seen:
                    raise CheckpointError(
                        f"{where} has {shortened(each.name)} twice, or not as a parameter"
                    )
                numel = math.prod(manifest.tensors[f"model/{each.name}"].shape)
                if numel != each.numel or param.trained != chunk.trained:
                    raise CheckpointError(f"{where} has {shortened(each.name)} in two ways")
                seen.add(each.name)
    missing = sorted(
        name for name in set(manifest.params) - seen if manifest.tensors[f"model/{name}"].numel
    )
    if missing:
        raise CheckpointError(f"{where} has no place of {shortened(missing[0])}")
    for name in manifest.buffers:
        if f"model/{name}" not in record.small:
            raise CheckpointError(f"{where} has no values of {shortened(name)}")
