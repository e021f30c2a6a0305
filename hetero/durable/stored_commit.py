"""The last commit of a durable state as a stored checkpoint, for whoever has no model."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from hetero.checkpoint.formats.opening import open_checkpoint
from hetero.checkpoint.formats.stored_checkpoint import StoredCheckpoint
from hetero.durable.commit_reader import CommitReader, data_paths, merged_manifest
from hetero.durable.state_folder import read_last_commit
from hetero.state.memory.state_files import FOLDER
from offload.errors import CheckpointError


class StoredCommit(StoredCheckpoint):
    """What hetero.commit(), or step() with durable=True, has made durable last."""

    kind = "commit of a durable state"

    def __init__(self, path: Path) -> None:
        """Reads the records in the folder `path`. Raises CheckpointError, StoreError.

        The training may go on: what it overwrites meanwhile is an error of a checksum.
        """
        super().__init__(path)
        notes: list[str] = []
        records = read_last_commit(path, notes)
        for note in notes:
            print(f"hetero: {note}", file=sys.stderr)
        if not records:
            raise CheckpointError(f"{path} has no commit yet")
        self.manifest = merged_manifest(records)
        paths = {each for r in records for group in r.groups for each in data_paths(r, group)}
        self.files = {os.path.relpath(each, path): os.stat(each).st_size for each in sorted(paths)}
        self._reader = CommitReader(records, path, "auto")

    def read(self, key: str, begin: int, end: int) -> torch.Tensor:
        """See StoredCheckpoint; checksums are verified."""
        return self._reader.read(key, begin, end).clone()

    def close(self) -> None:
        """See StoredCheckpoint."""
        self._reader.close()


def open_stored(path: Path) -> StoredCheckpoint:
    """Opens a checkpoint in any format, or the last commit in a folder "hetero-state".

    `path` may be the folder that has it.

    Raises as open_checkpoint(), and CheckpointError.
    """
    for folder in (path, path / FOLDER):
        if folder.name == FOLDER and folder.is_dir():
            return StoredCommit(folder)
    return open_checkpoint(path)
