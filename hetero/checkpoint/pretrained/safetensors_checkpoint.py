"""Folders of Hugging Face's, and single safetensors files, for reading."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from hetero.checkpoint.manifest import TensorRecord
from hetero.checkpoint.safetensors_header import MAX_HEADER_BYTES, Entry, read
from hetero.checkpoint.schema import content_of, parse_json, typed
from hetero.checkpoint.stored_checkpoint import StoredCheckpoint, manifest_of_values
from offload.errors import CheckpointError, StoreError

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, whose elements begin at byte `offset` of it."""

    path: Path
    entry: Entry
    offset: int


class SafetensorsCheckpoint(StoredCheckpoint):
    """Tensors by name, and no optimizer state.

    Attributes:
        tensors: by name.
    """

    def __init__(self, path: Path) -> None:
        """Reads the index and the headers of all files.

        Raises:
            CheckpointError: there are no such files, or they are damaged or contradict each other.
            StoreError: one cannot be opened or read.
        """
        super().__init__(path)
        self.kind = "Hugging Face folder" if path.is_dir() else "safetensors file"
        self.rename(_find_tensors(path))
        facts = repr([(n, s.path.name, s.entry, s.offset) for n, s in self.tensors.items()])
        self.digest = hashlib.sha256(facts.encode()).hexdigest()
        paths = {stored.path for stored in self.tensors.values()}
        self.files = {each.name: each.stat().st_size for each in sorted(paths)}

    def rename(self, tensors: dict[str, StoredTensor]) -> None:
        """From here on it has these tensors alone, by these names."""
        self.tensors = tensors
        self.manifest = manifest_of_values(
            {name: TensorRecord(t.entry.shape, t.entry.dtype) for name, t in tensors.items()}
        )

    def read(self, key: str, begin: int, end: int) -> torch.Tensor:
        """See StoredCheckpoint."""
        stored = self.tensors[key.partition("/")[2]]
        found = torch.empty(end - begin, dtype=stored.entry.dtype)
        memory, done = found.view(torch.uint8).numpy().data, 0
        try:
            descriptor = os.open(stored.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                while done < len(memory):
                    offset = stored.offset + begin * found.itemsize + done
                    count = os.preadv(descriptor, [memory[done:]], offset)
                    if not count:
                        raise CheckpointError(
                            f"{stored.path} ends at byte {offset}, inside of "
                            f"{stored.entry.name!r}; it was longer when its header was read"
                        )
                    done += count
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _store_error(error, stored.path) from error
        return found

    def close(self) -> None:
        """See StoredCheckpoint; nothing is held."""


def _find_tensors(path: Path) -> dict[str, StoredTensor]:
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


def _tensors_of(paths: Iterable[Path]) -> dict[str, StoredTensor]:
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
    index = parse_json(content_of(path, MAX_HEADER_BYTES, "Hugging Face folder"), str(path))
    wanted = index.get("weight_map")
    names: dict[str, str] = typed(Mapping[str, str], wanted, f"weight_map in {path}")
    for name, file_name in names.items():
        # Nothing outside of the folder.
        if file_name in ("", "..") or Path(file_name).name != file_name or "\0" in file_name:
            raise CheckpointError(f"{path} says that {name!r} is in {file_name!r}: no file's name")
    return names


def _store_error(error: OSError, path: Path) -> StoreError:
    text = f"cannot read: {error.strerror}"
    return StoreError(error.errno, text, str(error.filename or path))
