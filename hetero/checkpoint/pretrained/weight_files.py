"""Writes a folder of Hugging Face's: safetensors files, and their index if there are several.

All ranks plan the files alike: places of tensors follow from names, dtypes and shapes. Each then
writes its own ranges into the same files, and the first one their headers, too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hetero.checkpoint.checkpoint_write import CheckpointWrite
from hetero.checkpoint.manifest import TensorRecord, name_of
from hetero.checkpoint.pretrained.safetensors_checkpoint import INDEX_NAME, WEIGHTS_NAME
from hetero.checkpoint.safetensors_header import encode
from hetero.checkpoint.stored_checkpoint import StoredCheckpoint
from offload.disk.durable import write_all, write_durably
from offload.disk.new_folder import NewFolder

# By this an earlier export is told from a folder that somebody else has made.
METADATA = {"format": "pt", "writer": "hetero"}


@dataclass(frozen=True)
class FilePlace:
    """Where a tensor goes: byte `offset` of a file, in a dtype."""

    file: str
    offset: int
    dtype: torch.dtype


class PretrainedWrite(CheckpointWrite):
    """Writes parameters and buffers as Hugging Face has them: one rank's part."""

    def __init__(
        self,
        stored: StoredCheckpoint,
        keys: Mapping[str, str],
        most_bytes: int,
        dtype: torch.dtype | None = None,
        rank: int = 0,
    ) -> None:
        """Nothing is written yet.

        Args:
            stored: has the values; of a model in training this rank's.
            keys: by the names that tensors get, the keys that `stored` has them by.
            most_bytes: a file has no more bytes of tensors, unless a single tensor has.
            dtype: of parameters; None: as they are stored. Buffers keep their own.
            rank: this rank's number; the first one makes the headers and the index.

        Raises ValueError for what safetensors files cannot have.
        """
        super().__init__(stored)
        self._rank = rank
        self._heads: dict[str, bytes] = {}
        self._nbytes: dict[str, int] = {}
        self._places: dict[str, FilePlace] = {}
        manifest = stored.manifest
        tensors = {name: manifest.tensors[key] for name, key in keys.items()}
        for name, tensor in tensors.items():
            if dtype is not None and name_of(keys[name]) in manifest.params:
                tensors[name] = replace(tensor, dtype=dtype)
        self._plan(_shards(tensors, most_bytes), tensors)
        # Names that are tied, and both written, have one key.
        self._by_key: dict[str, list[FilePlace]] = {}
        for name, place in self._places.items():
            self._by_key.setdefault(keys[name], []).append(place)
        facts = repr((self._heads, self._nbytes))
        self.digest = hashlib.sha256(facts.encode()).hexdigest()

    def _plan(self, shards: list[list[str]], tensors: Mapping[str, TensorRecord]) -> None:
        """Decides where each tensor goes."""
        stem = Path(WEIGHTS_NAME).stem
        for number, names in enumerate(shards, 1):
            file = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
            file = WEIGHTS_NAME if len(shards) == 1 else file
            # Those of larger elements first: so all are aligned, and no reader must copy them.
            names.sort(key=lambda name: -tensors[name].dtype.itemsize)
            described = [(name, tensors[name].dtype, tensors[name].shape) for name in names]
            self._heads[file], header = encode(described, METADATA)
            self._nbytes[file] = header.file_bytes
            for name, entry in header.entries.items():
                self._places[name] = FilePlace(file, header.data_offset + entry.begin, entry.dtype)

    def write(self, folder: Path) -> bytes:
        """See CheckpointWrite."""
        with ExitStack() as resources:
            files: dict[str, int] = {}
            for name in self._heads:
                flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
                files[name] = os.open(folder / name, flags, 0o666)
                resources.callback(os.close, files[name])
            for name, head in self._heads.items() if self._rank == 0 else ():
                os.ftruncate(files[name], self._nbytes[name])
                write_all(files[name], head, 0)
            for key, begin, values in self.stored.contents(self._by_key):
                for place in self._by_key[key]:
                    offset = place.offset + begin * place.dtype.itemsize
                    write_all(files[place.file], _bytes_of(values, place.dtype), offset)
            for descriptor in files.values():
                os.fsync(descriptor)
        return b""

    def finish(self, folder: NewFolder, parts: Sequence[bytes]) -> None:
        """See CheckpointWrite."""
        if len(self._heads) > 1:
            total = sum(self._nbytes[name] - len(head) for name, head in self._heads.items())
            weight_map = {name: place.file for name, place in self._places.items()}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            write_durably(folder.incomplete / INDEX_NAME, text.encode())


def _shards(tensors: Mapping[str, TensorRecord], most_bytes: int) -> list[list[str]]:
    """The names of the tensors of each file."""
    shards: list[list[str]] = [[]]
    room = most_bytes
    for name, tensor in tensors.items():
        nbytes = tensor.numel * tensor.dtype.itemsize
        if nbytes > room and shards[-1]:
            shards.append([])
            room = most_bytes
        shards[-1].append(name)
        room -= nbytes
    return shards


def _bytes_of(values: torch.Tensor, dtype: torch.dtype) -> memoryview:
    dense = values.detach().to("cpu", dtype).contiguous()
    # (Of one element torch calls any stride contiguous, and then refuses other views of it.)
    memory: memoryview = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data
    return memory
