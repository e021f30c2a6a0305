"""The files of a folder of Hugging Face's that is written: names, headers, places of tensors."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from hetero.checkpoint.manifest import TensorRecord
from hetero.checkpoint.pretrained.safetensors_checkpoint import INDEX_NAME, WEIGHTS_NAME
from hetero.checkpoint.safetensors_header import encode

# By this an earlier export is told from a folder that somebody else has made.
METADATA = {"format": "pt", "writer": "hetero"}


@dataclass(frozen=True)
class FilePlace:
    """Where a tensor goes: byte `offset` of a file, in a dtype."""

    file: str
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class WeightFiles:
    """The files, and where each tensor is in them.

    Attributes:
        heads: by the files' names, their first bytes.
        nbytes: of each file, by its name.
        places: of the tensors, by name.
    """

    heads: Mapping[str, bytes]
    nbytes: Mapping[str, int]
    places: Mapping[str, FilePlace]

    @classmethod
    def of(cls, tensors: Mapping[str, TensorRecord], most_bytes: int) -> WeightFiles:
        """The files of tensors by name; none has more bytes of these, unless a single tensor has.

        Raises ValueError for what safetensors files cannot have.
        """
        shards: list[list[str]] = [[]]
        room = most_bytes
        for name, tensor in tensors.items():
            nbytes = tensor.numel * tensor.dtype.itemsize
            if nbytes > room and shards[-1]:
                shards.append([])
                room = most_bytes
            shards[-1].append(name)
            room -= nbytes
        heads, sizes, places = {}, {}, {}
        stem = Path(WEIGHTS_NAME).stem
        for number, names in enumerate(shards, 1):
            file = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
            file = WEIGHTS_NAME if len(shards) == 1 else file
            # Those of larger elements first: so all are aligned, and no reader must copy them.
            names.sort(key=lambda name: -tensors[name].dtype.itemsize)
            described = [(name, tensors[name].dtype, tensors[name].shape) for name in names]
            heads[file], header = encode(described, METADATA)
            sizes[file] = header.file_bytes
            for name, entry in header.entries.items():
                places[name] = FilePlace(file, header.data_offset + entry.begin, entry.dtype)
        return cls(heads, sizes, places)

    @property
    def digest(self) -> str:
        """The same on all ranks if they write the same files."""
        return hashlib.sha256(repr((self.heads, self.nbytes)).encode()).hexdigest()

    def make(self, folder: Path) -> None:
        """Makes the files with their headers, and their index if there are several."""
        for name, head in self.heads.items():
            with (folder / name).open("xb", buffering=0) as stream:
                memory = memoryview(head)
                while memory:
                    memory = memory[stream.write(memory) :]
                stream.truncate(self.nbytes[name])
        if len(self.heads) > 1:
            total = sum(self.nbytes[name] - len(head) for name, head in self.heads.items())
            weight_map = {name: place.file for name, place in self.places.items()}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (folder / INDEX_NAME).write_text(text, encoding="utf-8")


class OpenFiles:
    """The files of a folder, open for writing at any place; each rank has its own object."""

    def __init__(self, folder: Path, files: WeightFiles) -> None:
        """Opens all. Raises OSError."""
        self._files: dict[str, int] = {}
        try:
            for name in files.heads:
                self._files[name] = os.open(folder / name, os.O_WRONLY | os.O_CLOEXEC)
        except BaseException:
            self.close()
            raise

    def write(self, place: FilePlace, begin: int, values: torch.Tensor) -> None:
        """Writes a tensor's flat elements from number `begin` on. Raises OSError."""
        dense = values.detach().to("cpu", place.dtype).contiguous()
        if not dense.numel():
            return
        # (Of one element torch calls any stride contiguous, and then refuses other views of it.)
        flat = dense.as_strided((dense.numel(),), (1,))
        memory = flat.view(torch.uint8).numpy().data
        done, offset = 0, place.offset + begin * place.dtype.itemsize
        while done < len(memory):
            done += os.pwrite(self._files[place.file], memory[done:], offset + done)

    def sync(self) -> None:
        """Returns when what was written is durable. Raises OSError."""
        for descriptor in self._files.values():
            os.fsync(descriptor)

    def close(self) -> None:
        """Idempotent."""
        while self._files:
            os.close(self._files.popitem()[1])
