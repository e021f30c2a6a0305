"""The tensors that a folder of Hugging Face's has in its files, and reading them part by part."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetero.checkpoint.safetensors_header import MAX_HEADER_BYTES, Entry, read
from offload.errors import CheckpointError, StoreError

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
# What is read at a time. A multiple of each dtype's size.
PART_BYTES = 4 << 20
_OPEN_FILES = 16


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, whose elements begin at byte `offset` of it."""

    path: Path
    entry: Entry
    offset: int


def find_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder, by name; `path` may be a single safetensors file, too.

    Reads the index and the headers of all files.

    Raises:
        CheckpointError: there are no such files, or they are damaged or contradict each other.
        StoreError: one cannot be opened or read.
    """
    try:
        if not path.is_dir():
            return _tensors_of([path])
        if (path / WEIGHTS_NAME).exists():
            return _tensors_of([path / WEIGHTS_NAME])
        index = path / INDEX_NAME
        if not index.exists():
            raise CheckpointError(
                f"{path} has neither {WEIGHTS_NAME} nor {INDEX_NAME}; weights in other formats are "
                f"loaded by from_pretrained() inside hetero.ZeroInitContext"
            )
        names = _read_index(index)
        found = _tensors_of(path / name for name in sorted(set(names.values())))
    except OSError as error:
        raise _store_error(error, path) from error
    for name, file_name in names.items():
        if name not in found or found[name].path.name != file_name:
            raise CheckpointError(f"{index} says that {name!r} is in {file_name}, and it is not")
    return found


def _tensors_of(paths: Any) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for path in paths:
        header = read(path)
        for name, entry in header.entries.items():
            if name in found:
                raise CheckpointError(f"{found[name].path} and {path} both have {name!r}")
            found[name] = StoredTensor(path, entry, header.data_offset + entry.begin)
    return found


def _read_index(path: Path) -> dict[str, str]:
    """The names of files by the names of tensors."""
    if path.stat().st_size > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path} has more than {MAX_HEADER_BYTES} bytes")
    try:
        index = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict):
        raise CheckpointError(f"{path} has no object weight_map")
    for name, file_name in names.items():
        # Nothing outside of the folder.
        if not isinstance(file_name, str) or not _is_plain(file_name):
            raise CheckpointError(f"{path} says that {name!r} is in {file_name!r}: no file's name")
    return names


def _is_plain(file_name: str) -> bool:
    """Whether it is a name without folders."""
    return (
        file_name not in ("", "..") and Path(file_name).name == file_name and "\0" not in file_name
    )


class TensorReader:
    """Reads parts of stored tensors through one buffer of PART_BYTES; close() closes the files."""

    def __init__(self) -> None:
        self._buffer = torch.empty(PART_BYTES, dtype=torch.uint8)
        self._files: OrderedDict[Path, int] = OrderedDict()  # descriptors, the last used at the end

    def parts(
        self, stored: StoredTensor, begin: int, end: int
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Elements [begin, end) of the flat tensor, part by part, and where each part begins.

        A part is flat, in the dtype of the file, in memory that the next part overwrites.

        Raises:
            CheckpointError: the file is shorter than its header says.
            StoreError: it cannot be read.
        """
        dtype = stored.entry.dtype
        most = PART_BYTES // dtype.itemsize
        for first in range(begin, end, most):
            numel = min(most, end - first)
            self._fill(stored, first * dtype.itemsize, numel * dtype.itemsize)
            yield first, self._buffer[: numel * dtype.itemsize].view(dtype)

    def _fill(self, stored: StoredTensor, begin: int, nbytes: int) -> None:
        try:
            descriptor = self._open(stored.path)
            memory = self._buffer.numpy().data
            done = 0
            while done < nbytes:
                offset = stored.offset + begin + done
                count = os.preadv(descriptor, [memory[done:nbytes]], offset)
                if not count:
                    raise CheckpointError(
                        f"{stored.path} ends at byte {offset}, inside of {stored.entry.name!r}; it "
                        f"was longer when its header was read"
                    )
                done += count
        except OSError as error:
            raise _store_error(error, stored.path) from error

    def _open(self, path: Path) -> int:
        if path in self._files:
            self._files.move_to_end(path)
        else:
            if len(self._files) == _OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._files[path]

    def close(self) -> None:
        """Idempotent."""
        while self._files:
            os.close(self._files.popitem()[1])


def _store_error(error: OSError, path: Path) -> StoreError:
    text = f"cannot read: {error.strerror}"
    return StoreError(error.errno, text, str(error.filename or path))
