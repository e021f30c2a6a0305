"""Opens what `hetero inspect` and `hetero convert` are given: a checkpoint, or a run folder."""

from __future__ import annotations

from pathlib import Path

from hetero.checkpoint.stored_checkpoint import StoredCheckpoint
from hetero.durable.stored_commit import open_stored
from hetero.job.run_folder import CHECKPOINTS_NAME, MODEL_NAME, RunFolder
from hetero.state.memory.state_files import FOLDER


def open_left(path: Path) -> StoredCheckpoint:
    """open_stored(); of a run folder its last commit, or checkpoint, or else its trained weights.

    Raises as open_stored(), and CheckpointError for a run that has left none of these.
    """
    if RunFolder.has_run(path):
        for folder in (path / FOLDER, path / CHECKPOINTS_NAME, path / MODEL_NAME):
            if folder.is_dir():
                return open_stored(folder)
    return open_stored(path)
