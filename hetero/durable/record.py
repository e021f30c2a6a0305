"""The record of a commit: what one rank's state was, and where in its data files it lies.

docs/formats.md describes the format. decode() takes nothing on trust: a record that was cut,
changed or made up is an error that names what is wrong.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from hetero.checkpoint.manifest import Fields, Manifest, parse_json, parse_manifest, shortened
from hetero.checkpoint.model_tensors import STATE_NAMES
from hetero.chunks.dtypes import Dtypes
from offload._native import StripeMap, crc32c
from offload.errors import CheckpointError
from offload.memory.sizes import PAGE_BYTES, round_up

VERSION = 1
_MAGIC = b"hetero\0commit\0\0\0"
_ORDER = 0x01020304  # as this machine has it: another one's bytes are in another order
# Magic, byte order, version, checksum of this page, of the rest; generation, number, rank, ranks;
# bytes of the four sections.
_HEAD = struct.Struct("=16s4I4Q4Q")
_MOST_BYTES = 1 << 40  # of a section
_LARGEST = 1 << 62  # of an offset
_COMPUTE, _STATES = ("fp32", "bf16", "fp16"), ("fp32", "bf16", "8bit")
_RULES = tuple(STATE_NAMES)


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
        files: the members of the data file, relative to the folder that has the record.
        weights: how many units of the stripes each member gets in turn (StripeMap).
        unit_bytes: of a unit.
        chunks: by their ids.
        checksums: CRC-32C of each page, as little-endian uint32, 0 if nothing is known of the page:
            of all chunks one after the other the parameters, then the optimizer state.
    """

    compute: str
    rule: str
    state: str
    tile_numel: int
    rank: int
    ranks: int
    files: tuple[str, ...]
    weights: tuple[int, ...]
    unit_bytes: int
    chunks: tuple[StoredChunk, ...]
    checksums: bytes = field(repr=False)

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
    """

    generation: int
    number: int
    rank: int
    ranks: int
    manifest: Manifest = field(repr=False)
    groups: tuple[StoredGroup, ...] = field(repr=False)
    small: Mapping[str, torch.Tensor] = field(repr=False)


def encode(record: Record) -> bytearray:
    """The content of the record's file, in whole pages."""
    groups = [
        {name: value for name, value in asdict(group).items() if name != "checksums"}
        for group in record.groups
    ]
    content = {"groups": groups, "small": list(record.small)}
    sections = [
        record.manifest.to_json(),
        json.dumps(content, allow_nan=False).encode(),
        b"".join(group.checksums for group in record.groups),
        b"".join(_bytes_of(tensor) for tensor in record.small.values()),
    ]
    rest = b"".join(sections)
    numbers = (record.generation, record.number, record.rank, record.ranks)
    sizes = [len(section) for section in sections]
    head = _head(0, _crc(rest), *numbers, *sizes)
    head = _head(_crc(head), _crc(rest), *numbers, *sizes)
    whole = bytearray(round_up(len(head) + len(rest), PAGE_BYTES))
    whole[: len(head)] = head
    whole[len(head) : len(head) + len(rest)] = rest
    return whole


def _head(own_crc: int, crc: int, *numbers: int) -> bytes:
    packed = _HEAD.pack(_MAGIC, _ORDER, VERSION, own_crc, crc, *numbers)
    return packed.ljust(PAGE_BYTES, b"\0")


def _crc(content: bytes | bytearray | memoryview) -> int:
    if not content:
        return 0
    array = np.frombuffer(content, dtype=np.uint8)
    return crc32c(int(array.ctypes.data), len(array))


def _bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().tobytes()


def decode(content: bytes, where: str) -> Record | None:
    """The record that the file `where` has; None if none was ever written to it.

    Raises CheckpointError: it is damaged, or cut off, or of another machine or version.
    """
    if not any(content[:PAGE_BYTES]):
        return None
    if len(content) < PAGE_BYTES:
        raise CheckpointError(f"{where} has {len(content)} bytes, and a record has a page at least")
    magic, order, version, own_crc, crc, *numbers = _HEAD.unpack_from(content)
    if magic != _MAGIC:
        raise CheckpointError(f"{where} is no record of a commit")
    if order != _ORDER:
        raise CheckpointError(
            f"{where} is of a machine with another byte order, whose state this one cannot read"
        )
    if version != VERSION:
        raise CheckpointError(
            f"{where} is of version {version} of the format, and this hetero reads version "
            f"{VERSION}; go on with the hetero that wrote it, or a later one"
        )
    if _crc(_head(0, crc, *numbers)) != own_crc or any(content[_HEAD.size : PAGE_BYTES]):
        raise CheckpointError(f"{where} is damaged: the checksum of its first page is another one")
    generation, number, rank, ranks, *sizes = numbers
    total = PAGE_BYTES + sum(sizes)
    if max(sizes) > _MOST_BYTES or total > len(content):
        raise CheckpointError(f"{where} has {len(content)} bytes of {total}: it was cut off")
    rest = memoryview(content)[PAGE_BYTES:total]
    if _crc(rest) != crc:
        raise CheckpointError(f"{where} is damaged, or was not written to its end")
    ends = np.cumsum([0, *sizes]).tolist()
    manifest_text, text, checksums, small = (
        bytes(rest[begin:end]) for begin, end in pairwise(ends)
    )
    manifest = parse_manifest(manifest_text, f"the manifest in {where}")
    fields = parse_json(text, where)
    groups = _groups(fields, checksums, where)
    if not 0 <= rank < ranks or number < 1 or generation < 1 or len(manifest.ranks) != 1:
        raise CheckpointError(f"{where} is of rank {rank} of {ranks} and commit {number}")
    made = Record(
        generation, number, rank, ranks, manifest, groups, _small(fields, manifest, small, where)
    )
    _check_params(made, where)
    return made


def _groups(fields: Fields, checksums: bytes, where: str) -> tuple[StoredGroup, ...]:
    found, at = [], 0
    for each in fields.objects("groups"):
        group = StoredGroup(
            compute=each.choice("compute", _COMPUTE),
            rule=each.choice("rule", _RULES),
            state=each.choice("state", _STATES),
            tile_numel=each.number("tile_numel"),
            rank=each.number("rank"),
            ranks=each.number("ranks"),
            files=each.texts("files"),
            weights=each.numbers("weights"),
            unit_bytes=each.number("unit_bytes"),
            chunks=tuple(_chunk(chunk) for chunk in each.objects("chunks")),
            checksums=b"",
        )
        _check_group(group, where)
        nbytes = sum(nbytes // PAGE_BYTES * 4 for _, _, nbytes in group.extents())
        if nbytes > len(checksums) - at:
            raise CheckpointError(f"{where} lacks checksums of its pages")
        found.append(StoredGroup(**{**vars(group), "checksums": checksums[at : at + nbytes]}))
        at += nbytes
    if at != len(checksums):
        raise CheckpointError(f"{where} has {len(checksums) - at} bytes of checksums too many")
    return tuple(found)


def _chunk(fields: Fields) -> StoredChunk:
    trained = fields.flag("trained")
    return StoredChunk(
        slots=fields.number("slots"),
        trained=trained,
        slices=tuple(
            StoredSlice(each.text("name"), each.number("offset"), each.number("numel"))
            for each in fields.objects("slices")
        ),
        param=fields.number("param"),
        optim_state=fields.number("optim_state") if trained else None,
    )


def _check_group(group: StoredGroup, where: str) -> None:
    """Raises CheckpointError if parts of it contradict each other."""
    if not 0 < group.tile_numel <= 2**40 or group.tile_numel % 2048:
        raise CheckpointError(f"{where} has tiles of {group.tile_numel} elements")
    if not 0 <= group.rank < group.ranks <= 2**31:
        raise CheckpointError(f"{where} has the shard {group.rank} of {group.ranks}")
    if len(group.files) != len(group.weights):
        raise CheckpointError(
            f"{where} has {len(group.files)} files, and weights of {len(group.weights)}"
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
    if end > _LARGEST:
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
    fields: Fields, manifest: Manifest, content: bytes, where: str
) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    at = 0
    for key in fields.texts("small"):
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
