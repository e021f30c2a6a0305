"""Reads hetero's own checkpoints, for whoever has no model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from hetero.checkpoint.data_reader import DataReader, StoredPiece
from hetero.checkpoint.formats.stored_checkpoint import StoredCheckpoint
from hetero.checkpoint.manifest import read_manifest
from offload.errors import CheckpointError, StoreError


class HeteroCheckpoint(StoredCheckpoint):
    """What hetero.save() has written."""

    kind = "hetero checkpoint"

    def __init__(self, path: Path) -> None:
        """Reads the manifest. Raises CheckpointError."""
        super().__init__(path)
        self.manifest = read_manifest(path)
        self.files = {name: file.nbytes for name, file in self.manifest.files.items()}
        self._opened: DataReader | None = None

    @property
    def _reader(self) -> DataReader:
        if self._opened is None:
            try:
                self._opened = DataReader(
                    self.path, self.manifest.files, self.manifest.tensors, "auto"
                )
            except StoreError as error:
                raise CheckpointError(f"{self.path} cannot be read: {error}") from error
        return self._opened

    def read(self, key: str, begin: int, end: int) -> torch.Tensor:
        """See StoredCheckpoint; checksums are verified."""
        return self._reader.read(key, begin, end)

    def verify(self) -> Iterator[tuple[StoredPiece, CheckpointError | None]]:
        """Reads every piece; yields each, and what is wrong with it.

        Raises CheckpointError if the files are not those that the manifest says.
        """
        reader = self._reader
        reader.expect((piece.key, piece.begin, piece.end) for piece in reader.pieces())
        for piece in reader.pieces():
            try:
                reader.read(piece.key, piece.begin, piece.end)
            except CheckpointError as error:
                yield piece, error
            else:
                yield piece, None

    def close(self) -> None:
        """See StoredCheckpoint."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None
