"""Brings the last commit of an earlier start back, whatever its ranks and its placement.

A start makes a new generation of files, and the old one goes when the new one has a commit: nothing
is changed in place that a second crash could lose. initialize() brings model and optimizer back,
and hetero.resume() what the loop has made since, because schedulers change rates as they are
constructed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hetero.api.optimizer import HybridOptimizer
from hetero.checkpoint.load import Checkpoint, Source, load_from
from hetero.checkpoint.rank_data import LoopState
from hetero.durable.commit_reader import CommitReader, merged_manifest
from hetero.durable.state_folder import StateFolder
from hetero.runtime.engine import Engine


def restore(
    engine: Engine, optimizers: Sequence[HybridOptimizer], folder: StateFolder
) -> tuple[Checkpoint, LoopState]:
    """Loads the last commit in the folder; all ranks call it.

    Raises as hetero.load(): ValueError if it is of another model or optimizer.
    """

    def open_source() -> Source:
        path = Path(folder.folders[0])
        manifest = merged_manifest(folder.last)
        return Source(
            path,
            manifest,
            lambda: CommitReader(folder.last, path, engine.config.debugging.io_engine),
        )

    try:
        return load_from(open_source, engine, optimizers, {}, "the last commit")
    except ValueError as error:
        raise ValueError(
            f"{folder.folders[0]} has the durable state of another training: {error}; a new one "
            f"needs another nvme_path, or this folder removed"
        ) from error
