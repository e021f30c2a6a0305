"""Checkpoints that are written into a new folder: each rank its part, then the first one the rest.

A CheckpointWrite is a format, and a StoredCheckpoint that it writes: one of another format, or a
model in training.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hetero.checkpoint.data_writer import DataWriter, WrittenFile
from hetero.checkpoint.manifest import NAME, Manifest, TensorRecord, master_key
from hetero.checkpoint.stored_checkpoint import StoredCheckpoint
from offload.disk.durable import write_durably
from offload.disk.new_folder import NewFolder


class CheckpointWrite(ABC):
    """One rank's part of a checkpoint that is written.

    Attributes:
        stored: has the values; of a model in training this rank's.
        digest: the same on all ranks if they write the same.
    """

    digest = ""

    def __init__(self, stored: StoredCheckpoint) -> None:
        self.stored = stored

    @abstractmethod
    def write(self, folder: Path) -> bytes:
        """Writes this rank's files, durably; returns what finish() needs of it.

        Raises OSError, NativeIoError, and what reading the values raises.
        """

    @abstractmethod
    def finish(self, folder: NewFolder, parts: Sequence[bytes]) -> None:
        """Writes the rest, durably, when all ranks have written; the first rank calls it.

        Args:
            folder: the folder.
            parts: what write() has returned on each rank.

        Raises OSError, CheckpointError.
        """


class HeteroWrite(CheckpointWrite):
    """Writes hetero's own format: a data file of each rank, and the manifest."""

    def __init__(
        self,
        stored: StoredCheckpoint,
        manifest: Manifest,
        rank: int = 0,
        ranks: int = 1,
        io_engine: str = "auto",
    ) -> None:
        """Nothing is written yet.

        Args:
            stored: has the values.
            manifest: what is written of them, and in which dtypes; of `data` and `ranks` this
                rank's alone.
            rank: this rank's number.
            ranks: how many there are.
            io_engine: as in Config.
        """
        super().__init__(stored)
        self._manifest = manifest
        self._name = f"rank-{rank:04}-of-{ranks:04}.safetensors"
        self._io_engine = io_engine

    @classmethod
    def of_stored(cls, stored: StoredCheckpoint, dtype: torch.dtype | None) -> HeteroWrite:
        """Of a checkpoint of another format; `dtype` is that of parameters that were not trained.

        What a rank alone has (random numbers, extra) is left out: loading leaves random numbers as
        they are.
        """
        manifest = stored.manifest
        tensors = _shared(manifest)
        for name, param in manifest.params.items():
            wanted = torch.float32 if param.trained else dtype
            if wanted is not None:
                tensors[master_key(name)] = replace(tensors[master_key(name)], dtype=wanted)
        return cls(stored, replace(manifest, tensors=tensors, ranks=()))

    def write(self, folder: Path) -> bytes:
        """See CheckpointWrite."""
        dtypes = {key: tensor.dtype for key, tensor in self._manifest.tensors.items()}
        path, regions = folder / self._name, [*self.stored.regions()]
        with closing(DataWriter(path, regions, dtypes, self._io_engine)) as writer:
            for key, begin, values in self.stored.contents(dtypes):
                writer.write(key, begin, values.to(dtypes[key]))
            written = writer.finish()
        shared, tensors = _shared(self._manifest), self._manifest.tensors
        own = {key: tensor for key, tensor in tensors.items() if key not in shared}
        return pickle.dumps((self._name, written, own, self._manifest.ranks))

    def finish(self, folder: NewFolder, parts: Sequence[bytes]) -> None:
        """See CheckpointWrite; the parts are pickles that come from no file."""
        files: dict[str, WrittenFile] = {}
        tensors, ranks = _shared(self._manifest), list[Any]()
        for part in parts:
            name, files[name], own, of_rank = pickle.loads(part)
            tensors |= own
            ranks += of_rank
        whole = replace(self._manifest, files=files, tensors=tensors, ranks=ranks)
        folder.require_files(files)
        write_durably(folder.incomplete / NAME, whole.to_json())


def _shared(manifest: Manifest) -> dict[str, TensorRecord]:
    """The tensors without those that a rank alone has."""
    return {key: t for key, t in manifest.tensors.items() if not key.startswith("data/")}
