"""Reads folders of Hugging Face's, and single safetensors files."""

from __future__ import annotations

from pathlib import Path

import torch

from hetero.checkpoint.manifest import TensorRecord
from hetero.checkpoint.pretrained.stored_tensors import TensorReader, find_tensors
from hetero.checkpoint.stored_checkpoint import StoredCheckpoint, manifest_of_values


class SafetensorsCheckpoint(StoredCheckpoint):
    """Tensors by name, and no optimizer state."""

    def __init__(self, path: Path) -> None:
        """Reads the headers. Raises CheckpointError or StoreError."""
        super().__init__(path)
        self.kind = "Hugging Face folder" if path.is_dir() else "safetensors file"
        self._tensors = find_tensors(path)
        self.manifest = manifest_of_values(
            {
                name: TensorRecord(stored.entry.shape, stored.entry.dtype)
                for name, stored in self._tensors.items()
            }
        )
        paths = {stored.path for stored in self._tensors.values()}
        self.files = {each.name: each.stat().st_size for each in sorted(paths)}
        self._reader = TensorReader()

    def read(self, key: str, begin: int, end: int) -> torch.Tensor:
        """See StoredCheckpoint."""
        stored = self._tensors[key.partition("/")[2]]
        found = torch.empty(end - begin, dtype=stored.entry.dtype)
        for first, values in self._reader.parts(stored, begin, end):
            found[first - begin : first - begin + values.numel()] = values
        return found

    def close(self) -> None:
        """See StoredCheckpoint."""
        self._reader.close()
