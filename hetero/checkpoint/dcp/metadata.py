"""Reads the .metadata of a DCP checkpoint, a pickle, without running anything that is in it.

torch reads it by pickle.load(), which calls whatever a file names. Here a name is looked up in a
table of what DCP writes, and all others are refused. What stands in for DCP's classes meanwhile
only keeps what it is given; DCP's own objects are made from that once it was checked. Before that
the pickle's opcodes are followed (torch_file.py), so that loading it takes no more than its size.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hetero.checkpoint.dcp.boxes import METADATA_NAME as NAME
from hetero.checkpoint.schema import LARGEST, member, shortened, typed
from hetero.checkpoint.torch_file import check_pickle
from offload.errors import CheckpointError

_MOST_BYTES = 1 << 30  # of the file, which is read at once
_MOST_SIZES = 64  # of a tensor: numpy and torch's loops have no more
_LONGEST_NAME = 4096  # of a file, or of a key's path in a nested state dict
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
# Names of a pickle that are classes of DCP's.
_CLASSES = {
    *((_METADATA_MODULE, name) for name in ("Metadata", "TensorStorageMetadata", "MetadataIndex")),
    *((_METADATA_MODULE, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata")),
    *((_METADATA_MODULE, name) for name in ("TensorProperties", "StorageMeta")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}


def read_metadata(folder: Path) -> Metadata:
    """The metadata of the DCP checkpoint in `folder`.

    Raises:
        CheckpointError: there is none, it names something that DCP does not write, or it
            contradicts itself.
    """
    path = folder / NAME
    try:
        if not path.is_file() and path.exists():  # opening a pipe would wait for a writer
            raise CheckpointError(f"{path} is not a regular file")
        nbytes = path.stat().st_size
        if nbytes > _MOST_BYTES:
            raise CheckpointError(f"{path} has {nbytes} bytes, and may have {_MOST_BYTES}")
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{folder} is no DCP checkpoint: {NAME} cannot be read: {error.strerror}"
        ) from error
    try:
        unpickler = _Unpickler(io.BytesIO(content), str(path))
        check_pickle(io.BytesIO(content), nbytes)
        found = unpickler.load()
    except CheckpointError:
        raise
    except Exception as error:  # a pickle that was cut or made up raises almost anything
        raise CheckpointError(
            f"{path} is damaged: {type(error).__name__}: {error or 'it is no pickle'}"
        ) from None
    try:
        return _metadata(found, len(content))
    except (CheckpointError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not as DCP writes it: {error}") from None


class _Unpickler(pickle.Unpickler):
    """Knows the names that DCP writes, and gives stand-ins that belong to one file alone.

    (A pickle can set attributes of what it names, so torch's own classes are not given to it.)
    """

    def __init__(self, stream: Any, path: str) -> None:
        super().__init__(stream)
        self._path = path
        self._given: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        key = (module, name)
        if key not in self._given:
            self._given[key] = self._stand_in(module, name)
        return self._given[key]

    def persistent_load(self, pid: Any) -> Any:
        raise CheckpointError(f"{self._path} has a persistent id, which DCP does not write")

    def _stand_in(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return type(name, (_StandIn,), {})
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        makers: dict[tuple[str, str], Callable[..., Any]] = {
            ("torch", "Size"): _given_tuple,
            ("torch.serialization", "_get_layout"): _given_text,
            (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"): _given_number,
            ("builtins", "getattr"): lambda _, member: _given_text(member),  # an enum's member
            ("collections", "OrderedDict"): dict,  # (its items come after it)
        }
        if (module, name) in makers:
            return makers[module, name]
        if module.partition(".")[0] == "pathlib" and name.endswith("Path"):
            return lambda *parts: _given_text("/".join(map(_given_text, parts)))
        raise CheckpointError(
            f"{self._path} names {module}.{name}, which DCP does not write and which could run "
            f"anything, so nothing of it was read; read such a file only by torch, and only if you "
            f"trust who wrote it"
        )


def _given_tuple(values: Any = ()) -> Any:
    if not isinstance(values, tuple) or len(values) > _MOST_SIZES:
        raise ValueError(f"it makes a size of {shortened(values)}")
    return values


def _given_text(text: Any) -> str:
    if not isinstance(text, str) or len(text) > _LONGEST_NAME:
        raise ValueError(f"it has {shortened(text)} where a text of DCP's is")
    return text


def _given_number(number: Any) -> str:
    if type(number) is not int or not 0 <= number < 256:
        raise ValueError(f"it has {shortened(number)} where a number of DCP's is")
    return str(number)


class _StandIn(dict[str, Any]):
    """The attributes that a pickle gives an object of DCP's, by name; each is a key of its own."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__

    def __setstate__(self, state: Any) -> None:
        self.update(state if isinstance(state, dict) else {"values": state})


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
class _Chunk:
    offsets: Any
    sizes: Any


@dataclass(frozen=True)
class _Place:
    relative_path: str
    offset: int
    length: int


def _metadata(found: Any, nbytes: int) -> Metadata:
    """DCP's own objects, of a file of so many bytes. Raises as typed(), and ValueError."""
    top: _Top = typed(_Top, found, "it")
    if not isinstance(top.storage_data, dict):
        raise ValueError("storage_data must be a dict")
    made: dict[str, Any] = {}
    for key, entry in top.state_dict_metadata.items():
        if entry == {}:
            made[key] = BytesStorageMetadata()
            continue
        made[key] = _tensor(shortened(key), typed(_Tensor, entry, shortened(key)), nbytes)
        nbytes -= len(made[key].chunks)
    places = {_index(index): _place(place) for index, place in top.storage_data.items()}
    for key, entry in made.items():
        wanted = [None] if isinstance(entry, BytesStorageMetadata) else entry.chunks
        for chunk in wanted:
            index = MetadataIndex(key, None if chunk is None else chunk.offsets)
            if index not in places:
                at = "" if chunk is None else f" at {tuple(chunk.offsets)}"
                raise ValueError(f"it does not say where {shortened(key)}{at} is")
    return Metadata(made, planner_data=_paths(found.get("planner_data")), storage_data=places)


def _tensor(key: str, entry: _Tensor, most_chunks: int) -> TensorStorageMetadata:
    size = _sizes(entry.size, f"the size of {key}")
    values = entry.properties.get("values")
    dtype = values[0] if isinstance(values, tuple) and values else entry.properties.get("dtype")
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{key} has the dtype {shortened(dtype)}")
    chunks, numel = [], 0
    if not isinstance(entry.chunks, list) or not entry.chunks:
        raise ValueError(f"{key} has no list of chunks")
    if len(entry.chunks) > most_chunks:  # one list can be that of many tensors
        raise ValueError("its tensors have more chunks together than it has bytes")
    for each in entry.chunks:
        chunk: _Chunk = typed(_Chunk, each, f"a chunk of {key}")
        offsets = _sizes(chunk.offsets, f"offsets of {key}")
        sizes = _sizes(chunk.sizes, f"sizes of {key}")
        if not len(offsets) == len(sizes) == len(size) or any(
            offset + part > whole for offset, part, whole in zip(offsets, sizes, size, strict=True)
        ):
            raise ValueError(f"{key} of {tuple(size)} has a chunk of {sizes} at {offsets}")
        chunks.append(ChunkStorageMetadata(offsets, sizes))
        numel += sizes.numel()
    if numel != size.numel():
        raise ValueError(f"{key} has {size.numel()} elements, and its chunks have {numel}")
    return TensorStorageMetadata(TensorProperties(dtype), size, chunks)


def _sizes(found: Any, what: str) -> torch.Size:
    good = isinstance(found, tuple) and len(found) <= _MOST_SIZES
    if not good or not all(type(size) is int and 0 <= size <= LARGEST for size in found):
        raise ValueError(f"{what} are {shortened(found)}")
    if math.prod(max(1, size) for size in found) > LARGEST:
        raise ValueError(f"{what} are {shortened(found)}, which is too large")
    return torch.Size(found)


def _index(found: Any) -> MetadataIndex:
    what = "a key of storage_data"
    if not isinstance(found, _StandIn):
        raise ValueError(f"{what} is a {type(found).__name__}, must be a MetadataIndex")
    key, offset = member(found, "fqn", str, what), found.get("offset")
    sizes = None if offset is None else _sizes(offset, f"offsets of {shortened(key)}")
    return MetadataIndex(key, sizes)


def _place(found: Any) -> _StorageInfo:
    place: _Place = typed(_Place, found, "a place in storage_data")
    # Nothing outside of the folder.
    name = place.relative_path
    if not 0 < len(name) <= _LONGEST_NAME or Path(name).name != name or "\0" in name:
        raise ValueError(f"{shortened(name)} is no file's name")
    transforms = found.get("transform_descriptors")
    if transforms:
        raise ValueError(
            f"{shortened(name)} is transformed by {shortened(transforms)}, which is not read here"
        )
    return _StorageInfo(name, place.offset, place.length)


def _paths(found: Any) -> dict[str, tuple[str | int, ...]]:
    """The path of each key in the nested state dict, where the writer has kept it."""
    if not isinstance(found, Mapping):
        return {}
    for key, path in found.items():
        good = isinstance(path, (tuple, list)) and len(path) <= _LONGEST_NAME
        good = good and all(type(each) in (str, int) for each in path)
        if not isinstance(key, str) or not good:
            raise ValueError(f"planner_data has {shortened(key)}: {shortened(path)}")
    return {key: tuple(path) for key, path in found.items()}
