"""Which run folder, and which checkpoint or commit of it, a run goes on from.

A run folder has the steps of one run, each made once or made again alike. So what it goes on from
is the last that it has kept; a run that goes back to an earlier checkpoint has a folder of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hetero.checkpoint.folder import (
    is_checkpoint,
    latest_checkpoint,
    latest_checkpoints,
    of_trainer,
)
from hetero.checkpoint.manifest import read_manifest
from hetero.job.options import TrainOptions
from hetero.job.run_folder import CHECKPOINTS_NAME, RunFolder

DATA_KEY = "run"  # in `extra` of checkpoints of `hetero finetune`: the data and steps of the run


def run_folder_to_resume(options: TrainOptions) -> str | None:
    """The run folder that --resume goes on in; None for a new one.

    That is --run-dir, or the run that the checkpoint is of, or the newest one in `runs`.
    """
    if options.resume is None or options.run_dir is not None:
        return options.run_dir
    if options.resume:
        path = Path(options.resume)
        for folder in (path, path.parent, path.parent.parent):
            if RunFolder.has_run(folder) and (folder / CHECKPOINTS_NAME).is_dir():
                return str(folder)
        return None
    runs = [each for each in Path("runs").glob("*") if RunFolder.has_run(each)]
    return str(max(runs, key=RunFolder.written_s)) if runs else None


class Beginning(NamedTuple):
    """What a run goes on from, as --resume says.

    Attributes:
        path: the checkpoint; None if the run begins anew, or has commits alone.
        takes_commit: a commit in --nvme-path is taken if it is later, and not of another run.
        run_id: of the run in the run folder; None if there is none, or it does not say.
    """

    path: Path | None
    takes_commit: bool
    run_id: str | None = None


def find_beginning(options: TrainOptions, run_folder: Path) -> Beginning:
    """What --resume means, as this rank sees it.

    Raises ValueError if a path was given and has no checkpoint, or one of the run folder's that is
    not the last of them.
    """
    if options.resume is None:
        return Beginning(None, False)
    own, run_id = latest_checkpoints(run_folder / CHECKPOINTS_NAME), RunFolder.run_id(run_folder)
    if not options.resume:
        return Beginning(next(iter(own), None), True, run_id)
    given = Path(options.resume)
    path: Path | None = of_trainer(given)
    if not is_checkpoint(of_trainer(given)):
        path = latest_checkpoint(given) or latest_checkpoint(given / CHECKPOINTS_NAME)
    if path is None:
        raise ValueError(f"--resume {given} is no checkpoint, and has none in it")
    places = [each.resolve() for each in own]
    if path.resolve() in places[1:]:
        raise ValueError(
            f"--resume {given} is not the last checkpoint of its run, which is {own[0]}; to go back"
            f" to it give a new folder: --run-dir DIR"
        )
    # (A run that began with another one's checkpoint, and is started again with the same words,
    # goes on with its own.)
    return Beginning(next(iter(own), path), RunFolder.has_run(run_folder), run_id)


def extra_of(path: Path) -> Mapping[str, Any]:
    """Step and data in a checkpoint's `extra`. Raises CheckpointError."""
    manifest = read_manifest(path)
    found: dict[str, Any] = {"step": manifest.step}
    if manifest.ranks:
        packed = manifest.ranks[0].get("extra") if isinstance(manifest.ranks[0], dict) else None
        for name in ("step", DATA_KEY):
            if isinstance(packed, dict) and name in packed:
                found[name] = packed[name]
    return found
