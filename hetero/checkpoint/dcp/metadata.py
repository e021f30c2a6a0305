"""Reads the .metadata of a DCP checkpoint, a pickle, without running anything that is in it.

torch reads it by pickle.load(), which calls whatever a file names. Here torch_file.py reads it, and
stand-ins for DCP's objects keep what they are given until it was checked. DCP cuts tensors into
boxes, which have offsets and sizes; a range of the flat tensor is several of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetero.checkpoint.manifest import TensorRecord, check_shape
from hetero.checkpoint.schema import LARGEST, content_of, member, shortened, typed
from hetero.checkpoint.torch_file import stand_in, unpickle
from offload.errors import CheckpointError

METADATA_NAME = ".metadata"  # the file that says what the checkpoint has
_MOST_BYTES = 1 << 30  # of the file, which is read at once
_LONGEST_NAME = 4096  # of a file, or of a key's path in a nested state dict


def _unused(*_: Any) -> None:
    """Layouts, members of enums and paths, which nothing here needs."""


_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata MetadataIndex"
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path", "PurePath")
# What DCP's pickles name, and what stands for it.
_NAMES: dict[str, Any] = {
    **{f"torch.{name}": value for name, value in vars(torch).items() if type(value) is torch.dtype},
    **{f"{_METADATA}.{name}": stand_in for name in _CLASSES.split()},
    **{f"{_METADATA}.{name}": stand_in for name in ("TensorProperties", "StorageMeta")},
    "torch.distributed.checkpoint.filesystem._StorageInfo": stand_in,
    "torch.Size": lambda values=(): values,
    "collections.OrderedDict": lambda *_: {},  # (its items come after it)
    "torch.serialization._get_layout": _unused,
    f"{_METADATA}._MEM_FORMAT_ENCODING": _unused,
    "builtins.getattr": _unused,  # (an enum's member)
    **{f"{module}.{name}": _unused for module in ("pathlib", "pathlib._local") for name in _PATHS},
}


@dataclass(frozen=True)
class Box:
    """A part of a tensor: where it begins and how large it is in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.sizes)

    def common_with(self, other: Box) -> Box | None:
        """What both boxes of a tensor have; None if that is nothing."""
        places = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        both = [
            (max(first, begin), min(first + size, begin + more))
            for first, size, begin, more in places
        ]
        if any(end <= begin for begin, end in both):
            return None
        return Box(tuple(b for b, _ in both), tuple(e - b for b, e in both))

    def cut(self, values: torch.Tensor, around: Box) -> torch.Tensor:
        """A view of this box in `values`, which are those of the box `around` it."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            values = values.narrow(dim, offset - around.offsets[dim], size)
        return values


def boxes_of(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Elements [begin, end) of the flat tensor, in order, as boxes that lie flat in one piece.

    There are at most 2 n - 1 of n dimensions: whole rows, and what is before and after them.
    """
    if not shape:
        yield Box((), ())
        return
    if len(shape) == 1:
        yield Box((begin,), (end - begin,))
        return
    row = math.prod(shape[1:])
    if begin % row:
        number, stop = begin // row, min(end, (begin // row + 1) * row)
        yield from _in_row(shape, number, begin - number * row, stop - number * row)
        begin = stop
    rows = (end - begin) // row
    if rows:
        yield Box((begin // row, *(0 for _ in shape[1:])), (rows, *shape[1:]))
        begin += rows * row
    if begin < end:
        yield from _in_row(shape, begin // row, 0, end - begin)


def _in_row(shape: Sequence[int], number: int, begin: int, end: int) -> Iterator[Box]:
    for box in boxes_of(shape[1:], begin, end):
        yield Box((number, *box.offsets), (1, *box.sizes))


def rows_around(shape: Sequence[int], begin: int, end: int) -> tuple[Box, int]:
    """The rows of a tensor that have its flat elements [begin, end), and the first row's element.

    Rows are along the first dimension.
    """
    if not shape:
        return Box((), ()), 0
    row = max(1, math.prod(shape[1:]))
    first, last = begin // row, -(-end // row)
    return Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])), first * row


@dataclass(frozen=True)
class Place:
    """Bytes of a file in the checkpoint's folder."""

    relative_path: str
    offset: int
    length: int


@dataclass(frozen=True)
class DcpMetadata:
    """What a checkpoint has, by the keys of the flattened state dict.

    Attributes:
        tensors: shapes and dtypes.
        boxes: of each tensor, its parts, and where torch.save() has written each.
        objects: where what is no tensor is.
        paths: of keys in the nested state dict, where the writer has kept them.
    """

    tensors: dict[str, TensorRecord]
    boxes: dict[str, list[tuple[Box, Place]]]
    objects: dict[str, Place]
    paths: dict[str, tuple[str | int, ...]]


def read_metadata(folder: Path) -> DcpMetadata:
    """The metadata of the DCP checkpoint in `folder`.

    Raises:
        CheckpointError: there is none, it names something that DCP does not write, or it
            contradicts itself.
    """
    path = folder / METADATA_NAME
    content = content_of(path, _MOST_BYTES, "DCP checkpoint")
    found = unpickle(content, str(path), _NAMES)
    try:
        return _metadata(found)
    except (CheckpointError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not as DCP writes it: {error}") from None


@dataclass(frozen=True)
class _Top:
    state_dict_metadata: Mapping[str, Any]
    storage_data: Any


@dataclass(frozen=True)
class _Tensor:
    properties: Mapping[str, Any]
    size: Any
    chunks: Any


@dataclass(frozen=True)
class _DcpChunk:
    offsets: Any
    sizes: Any


def _metadata(found: Any) -> DcpMetadata:
    top: _Top = typed(_Top, found, "it")
    if not isinstance(top.storage_data, dict):
        raise ValueError("storage_data must be a dict")
    places: dict[tuple[str, tuple[int, ...] | None], Place] = {}
    for index, place in top.storage_data.items():
        fields: Any = index if isinstance(index, dict) else {}
        key, offset = member(fields, "fqn", str, "a key of storage_data"), fields.get("offset")
        at = None if offset is None else _sizes(offset, f"offsets of {shortened(key)}")
        places[key, at] = _place(place)

    def place_of(key: str, at: tuple[int, ...] | None) -> Place:
        if (key, at) not in places:
            raise ValueError(
                f"it does not say where {shortened(key)}{f' at {at}' if at else ''} is"
            )
        return places[key, at]

    made = DcpMetadata({}, {}, {}, _paths(found.get("planner_data")))
    for key, entry in top.state_dict_metadata.items():
        if isinstance(entry, dict) and not entry:
            made.objects[key] = place_of(key, None)
        else:
            made.tensors[key], boxes = _tensor(shortened(key), entry)
            made.boxes[key] = [(box, place_of(key, box.offsets)) for box in boxes]
    return made


def _tensor(key: str, found: Any) -> tuple[TensorRecord, list[Box]]:
    entry: _Tensor = typed(_Tensor, found, key)
    values = entry.properties.get("values")
    dtype = values[0] if isinstance(values, tuple) and values else entry.properties.get("dtype")
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{key} has the dtype {shortened(dtype)}")
    record = TensorRecord(_sizes(entry.size, f"the size of {key}"), dtype)
    check_shape(record.shape, dtype, f"the size of {key}")
    if not isinstance(entry.chunks, list) or not entry.chunks:
        raise ValueError(f"{key} has no list of chunks")
    boxes = []
    for each in entry.chunks:
        chunk: _DcpChunk = typed(_DcpChunk, each, f"a chunk of {key}")
        box = Box(_sizes(chunk.offsets, f"of {key}"), _sizes(chunk.sizes, f"of {key}"))
        if not len(box.offsets) == len(box.sizes) == len(record.shape) or any(
            offset + part > whole
            for offset, part, whole in zip(box.offsets, box.sizes, record.shape, strict=True)
        ):
            raise ValueError(f"{key} of {record.shape} has a chunk of {box.sizes} at {box.offsets}")
        boxes.append(box)
    numel = sum(box.numel for box in boxes)
    if numel != record.numel:
        raise ValueError(f"{key} has {record.numel} elements, and its chunks have {numel}")
    _require_disjoint(boxes, key)
    return record, boxes


def _require_disjoint(boxes: Sequence[Box], key: str) -> None:
    """Raises ValueError if two boxes of a tensor have the same element.

    Only those are compared that meet along the dimension that has most offsets.
    """
    dims = range(len(boxes[0].offsets))
    along = max(dims, key=lambda dim: len({box.offsets[dim] for box in boxes}), default=0)
    near: list[Box] = []
    for box in sorted((b for b in boxes if b.numel and dims), key=lambda b: b.offsets[along]):
        near = [b for b in near if b.offsets[along] + b.sizes[along] > box.offsets[along]]
        if any(map(box.common_with, near)):
            raise ValueError(f"{key} has two chunks with the same elements, one at {box.offsets}")
        near.append(box)


def _sizes(found: Any, what: str) -> tuple[int, ...]:
    if type(found) is not tuple or not all(type(n) is int and 0 <= n <= LARGEST for n in found):
        raise ValueError(f"sizes {what} are {shortened(found)}")
    return found


def _place(found: Any) -> Place:
    place: Place = typed(Place, found, "a place in storage_data")
    # Nothing outside of the folder.
    name = place.relative_path
    if not 0 < len(name) <= _LONGEST_NAME or Path(name).name != name or "\0" in name:
        raise ValueError(f"{shortened(name)} is no file's name")
    transforms = found.get("transform_descriptors")
    if transforms:
        raise ValueError(
            f"{shortened(name)} is transformed by {shortened(transforms)}, which is not read here"
        )
    return place


def _paths(found: Any) -> dict[str, tuple[str | int, ...]]:
    """The path of each key in the nested state dict, where the writer has kept it."""
    if not isinstance(found, dict):
        return {}
    for key, path in found.items():
        good = isinstance(path, (tuple, list)) and len(path) <= _LONGEST_NAME
        good = good and all(type(each) in (str, int) for each in path)
        if not isinstance(key, str) or not good:
            raise ValueError(f"planner_data has {shortened(key)}: {shortened(path)}")
    return {key: tuple(path) for key, path in found.items()}
