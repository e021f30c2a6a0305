"""Which checkpoint or commit a run goes on from.

A run that goes back to an earlier checkpoint is on a new branch, which its first step begins: later
checkpoints are moved out of the folder of checkpoints, and the step is saved and committed. So the
last of each is always of the branch that the run is on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hetero.checkpoint.folder import (
    is_checkpoint,
    latest_checkpoint,
    latest_checkpoints,
    of_trainer,
)
from hetero.checkpoint.manifest import read_manifest
from hetero.job.options import TrainOptions
from hetero.job.ranks import Ranks
from hetero.job.run_folder import CHECKPOINTS_NAME, RunFolder
from offload.errors import CheckpointError

DATA_KEY = "run"  # in `extra` of checkpoints of `hetero finetune`: the data and steps of the run
_BEGUN_KEY = "begun"  # in `extra` of checkpoints and commits: Branch.begun
_LEFT_NAME = "left"  # in the run folder: checkpoints of branches that were left


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


def this_launch() -> str:
    """What starts of ranks again by one torchrun have in common; "" without torchrun."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return ""
    agent = psutil.Process(os.getppid())
    return f"{run} {agent.pid} {agent.create_time()}"


@dataclass
class Branch:
    """The branch that a run is on, and what it goes on from as --resume says.

    Attributes:
        run_folder: of the run.
        ranks: of the run.
        path: the checkpoint to go on from; None if the run begins anew, or has commits alone.
        goes_back: the checkpoint was given by name: later ones, and commits, are left behind, when
            the first step was made. A start that fails before leaves all as it was.
        begun: which checkpoint was given, to which launch of ranks; "" if that is not known. What
            the run keeps says so: its ranks, started again with the same words, go on from there.
    """

    run_folder: Path
    ranks: Ranks
    path: Path | None = None
    goes_back: bool = False
    begun: str = ""

    @classmethod
    def agreed(cls, options: TrainOptions, folder: RunFolder, ranks: Ranks) -> Branch:
        """What --resume means, as the first rank sees it.

        Raises ValueError, on all ranks, if a path was given and has no checkpoint.
        """
        found = ranks.from_first(lambda: _resumption(options, folder.path))
        return cls(folder.path, ranks, *found)

    @property
    def as_extra(self) -> dict[str, Any]:
        """For `extra` of a checkpoint or a commit."""
        return {_BEGUN_KEY: self.begun} if self.begun else {}

    def has(self, extra: Mapping[str, Any]) -> bool:
        """Whether the last commit, with this `extra`, is of the branch."""
        return not self.goes_back or _is_begun(self.begun, extra)

    def begins(self) -> bool:
        """Whether a step was the first one of a run that goes back: what is later was moved away.
        All ranks call it after each step, before they keep it."""
        begins, self.goes_back = self.goes_back, False
        if begins:
            self.ranks.from_first(self._move_later)
        return begins

    def _move_later(self) -> None:
        assert self.path is not None
        folder, source = (self.run_folder / CHECKPOINTS_NAME).resolve(), self.path.resolve()
        found = latest_checkpoints(folder)
        later = next((n for n, each in enumerate(found) if each.resolve() == source), len(found))
        left = self.run_folder / _LEFT_NAME / os.urandom(4).hex()
        for each in found[:later]:
            left.mkdir(parents=True, exist_ok=True)
            name = each.relative_to(folder).parts[0]
            (folder / name).rename(left / name)


def _is_begun(begun: str, extra: Mapping[str, Any]) -> bool:
    return bool(begun) and extra.get(_BEGUN_KEY) == begun


def _resumption(options: TrainOptions, run_folder: Path) -> tuple[Path | None, bool, str]:
    """path, goes_back and begun of the Branch."""
    if options.resume is None:
        return None, False, ""
    last = latest_checkpoint(run_folder / CHECKPOINTS_NAME)
    if not options.resume:
        return last, False, ""
    path = of_trainer(Path(options.resume))
    if is_checkpoint(path):
        launch = this_launch()
        begun = f"{path.resolve()} {launch}" if launch else ""
        # (A damaged one must not keep a run from going back.)
        with contextlib.suppress(CheckpointError):
            if begun and last is not None and _is_begun(begun, extra_of(last)):
                return last, False, begun
        return path, True, begun
    found = latest_checkpoint(path) or latest_checkpoint(path / CHECKPOINTS_NAME)
    if found is None:
        raise ValueError(f"--resume {path} is no checkpoint, and has none in it")
    return found, False, ""


def extra_of(path: Path) -> dict[str, Any]:
    """Step, data and `begun` in a checkpoint's `extra`. Raises CheckpointError."""
    manifest = read_manifest(path)
    found: dict[str, Any] = {"step": manifest.step}
    if manifest.ranks:
        packed = manifest.ranks[0].get("extra") if isinstance(manifest.ranks[0], dict) else None
        for name in ("step", DATA_KEY, _BEGUN_KEY):
            if isinstance(packed, dict) and name in packed:
                found[name] = packed[name]
    return found
