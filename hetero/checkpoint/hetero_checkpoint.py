"""Reads hetero's own checkpoints, with or without a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from hetero.checkpoint.data_reader import DataReader, StoredPiece
from hetero.checkpoint.manifest import read_manifest
from hetero.checkpoint.stored_checkpoint import Range, StoredCheckpoint
from offload.errors import CheckpointError, StoreError


class HeteroCheckpoint(StoredCheckpoint):
    """What hetero.save() has written."""

    kind = "hetero checkpoint"

    def __init__(self, path: Path, io_engine: str = "auto") -> None:
        """Reads the manifest; `io_engine` is as in Config. Raises CheckpointError."""
        super().__init__(path)
        self.manifest = read_manifest(path)
        self.files = {name: file.nbytes for name, file in self.manifest.files.items()}
        self._io_engine = io_engine
        self._opened: DataReader | None = None

    @property
    def _reader(self) -> DataReader:
        if self._opened is None:
            files, tensors = self.manifest.files, self.manifest.tensors
            try:
                self._opened = DataReader(self.path, files, tensors, self._io_engine)
            except StoreError as error:
                raise CheckpointError(f"{self.path} cannot be read: {error}") from error
        return self._opened

    def open(self) -> None:
        """See StoredCheckpoint."""
        _ = self._reader

    def expect(self, order: Iterable[Sequence[Range]]) -> None:
        """See StoredCheckpoint."""
        self._reader.expect(each for chunk in order for each in chunk)

    def read(self, key: str, begin: int, end: int) -> torch.Tensor:
        """See StoredCheckpoint; checksums are verified."""
        return self._reader.read(key, begin, end)

    def verify(self) -> Iterator[tuple[StoredPiece, CheckpointError | None]]:
        """Reads every piece; yields each, and what is wrong with it.

        Raises CheckpointError if the files are not those that the manifest says.
        """
        return self._reader.verify()

    def close(self) -> None:
        """See StoredCheckpoint."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None
