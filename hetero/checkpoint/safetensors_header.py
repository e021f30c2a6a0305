"""The header of a safetensors file: the place, dtype and shape of each tensor in the file.

A file is 8 bytes with the length of the header as a little-endian integer, the header in JSON, and
the data of all tensors, which have no holes. The safetensors library reads and validates headers.
Writing needs what the library has not: places of tensors before their values are known.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hetero.checkpoint.schema import shortened
from offload.errors import CheckpointError

_PREFIX_BYTES = 8
_METADATA = "__metadata__"
# The largest header that the reference implementation reads.
MAX_HEADER_BYTES = 100_000_000
_MAX_INT = 2**63 - 1  # what torch counts elements and bytes with

# By the format's names.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file, whose elements are bytes [begin, end) of the file's data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a file says of itself.

    Attributes:
        entries: the tensors by name, in the order of their data, which has no holes.
        metadata: free text by free keys.
        data_offset: the byte of the file at which data begins.
    """

    entries: dict[str, Entry]
    metadata: dict[str, str]
    data_offset: int

    @property
    def file_bytes(self) -> int:
        """The size of the whole file."""
        return self.data_offset + max((e.end for e in self.entries.values()), default=0)


def encode(
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
    alignment: int = 8,
) -> tuple[bytes, Header]:
    """The beginning of a file in which the data of `tensors` follow one another in this order.

    Args:
        tensors: name, dtype and shape of each.
        metadata: free text by free keys.
        alignment: data begins at a multiple of this; bytes.

    Returns:
        The bytes before the data, and what they say.

    Raises:
        ValueError: a name is there twice or is no text, the format has no such dtype, a shape is
            none, or the header is larger than 100 MB, which other implementations do not read.
    """
    entries: dict[str, Entry] = {}
    begin = 0
    for name, dtype, shape in tensors:
        if name in entries or name == _METADATA:
            raise ValueError(f"the name {name!r} is taken already; give each tensor its own")
        if dtype not in _NAMES:
            raise ValueError(f"tensor {name!r}: safetensors files have no {dtype}; convert it")
        if not all(type(size) is int and 0 <= size <= _MAX_INT for size in shape):
            raise ValueError(f"tensor {name!r} has the shape {shape}, which is no list of sizes")
        nbytes = _data_bytes(f"tensor {name!r}", dtype, shape)
        entries[name] = Entry(name, dtype, tuple(shape), begin, begin + nbytes)
        begin += nbytes
    fields: dict[str, Any] = {} if metadata is None else {_METADATA: dict(metadata)}
    for e in entries.values():
        places = [e.begin, e.end]
        fields[e.name] = {"dtype": _NAMES[e.dtype], "shape": e.shape, "data_offsets": places}
    try:
        text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a name or a text of metadata is not Unicode: {error}") from None
    data_offset = -(-(_PREFIX_BYTES + len(text)) // alignment) * alignment
    text = text.ljust(data_offset - _PREFIX_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(
            f"the header of {len(entries)} tensors has {len(text)} bytes, and readers take "
            f"{MAX_HEADER_BYTES}; write several files"
        )
    prefix = len(text).to_bytes(_PREFIX_BYTES, "little")
    return prefix + text, Header(entries, dict(metadata or {}), data_offset)


def read(path: str | os.PathLike[str]) -> Header:
    """The header of the file `path`, which fits the file's size.

    Raises:
        CheckpointError: the file is no safetensors file, or is damaged or cut off.
        OSError: it cannot be opened or read.
    """
    import safetensors  # (the checks of a GPU do without it)

    where = os.fspath(path)
    if not stat.S_ISREG(os.stat(path).st_mode):  # (opening a pipe would wait for a writer)
        raise CheckpointError(f"{where} is not a regular file")
    try:
        with safetensors.safe_open(where, "numpy") as stored, open(path, "rb") as stream:
            metadata = dict(stored.metadata() or {})
            begin, entries = 0, {}
            for name in stored.offset_keys():
                tensor = stored.get_slice(name)
                dtype, shape = DTYPES.get(tensor.get_dtype()), tuple(tensor.get_shape())
                if dtype is None:
                    raise ValueError(f"{shortened(name)} has the dtype {tensor.get_dtype()}")
                end = begin + _data_bytes(f"tensor {shortened(name)}", dtype, shape)
                entries[name] = Entry(name, dtype, shape, begin, end)
                begin = end
            nbytes = int.from_bytes(stream.read(_PREFIX_BYTES), "little")
    except (safetensors.SafetensorError, ValueError) as error:
        text = str(error)[:500]
        raise CheckpointError(
            f"{where} is no whole safetensors file, or of a kind that torch lacks: {text}"
        ) from None
    return Header(entries, metadata, _PREFIX_BYTES + nbytes)


def _data_bytes(what: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """The bytes of a tensor. Raises ValueError if a tensor cannot have the shape."""
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= max(size, 1)  # torch multiplies the other sizes of an empty tensor, too
        if nbytes > _MAX_INT:  # at once: the product of a million sizes would take forever
            raise ValueError(f"{what} has the shape {shortened(shape)}, more than 2^63 bytes")
    return 0 if 0 in shape else nbytes
