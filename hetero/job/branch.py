"""Which checkpoint or commit a run goes on from.

A run that goes back to an earlier checkpoint is on a new branch: later checkpoints are moved out of
its folder of checkpoints, and each commit says on which branch it was made.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hetero.checkpoint.folder import is_checkpoint, latest_checkpoints, of_trainer
from hetero.checkpoint.manifest import read_manifest
from hetero.job.options import TrainOptions
from hetero.job.ranks import Ranks
from hetero.job.run_folder import CHECKPOINTS_NAME, RunFolder

DATA_KEY = "run"  # in `extra` of checkpoints of `hetero finetune`: the data and steps of the run
_LINEAGE_NAME = "lineage.json"  # in the run folder
_LINEAGE_KEY = "lineage"  # in `extra` of commits
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


@dataclass(frozen=True)
class Lineage:
    """Where the run in a folder has gone back to last.

    Attributes:
        branch: the name of what it has made since.
        source: the checkpoint that this has begun from; "" of a run that has never gone back.
        launch: the launch of ranks that has begun it (this_launch()).
    """

    branch: str = "0"
    source: str = ""
    launch: str = ""

    def has(self, extra: Mapping[str, Any]) -> bool:
        """Whether a commit with this `extra` is of the branch. (Of several names, as earlier
        versions wrote them, the last one is the commit's.)"""
        return bool(extra.get(_LINEAGE_KEY, [("0", None)])[-1][0] == self.branch)

    @property
    def as_extra(self) -> dict[str, Any]:
        """For `extra` of a commit."""
        return {_LINEAGE_KEY: [[self.branch, None]]}

    @staticmethod
    def read(run_folder: Path) -> Lineage:
        """The run's; of a run that has never gone back its only branch. Raises ValueError."""
        path = run_folder / _LINEAGE_NAME
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            # (Of several branches, as earlier versions wrote them, checkpoints are in one folder.)
            ((branch, _),) = found["branches"]
            return Lineage(str(branch), str(found["source"]), str(found["launch"]))
        except (FileNotFoundError, NotADirectoryError):
            return Lineage()
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} says which checkpoints the run goes on from, and cannot be read: "
                f"{error!r}; give --resume a checkpoint"
            ) from None

    def write(self, run_folder: Path) -> None:
        """Replaces the run's. Raises OSError."""
        new = run_folder / f"{_LINEAGE_NAME}.new"
        content = {"branches": [[self.branch, None]], "source": self.source, "launch": self.launch}
        with new.open("w", encoding="utf-8") as stream:
            json.dump(content, stream)
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(run_folder / _LINEAGE_NAME)


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
        lineage: the run's.
        run_folder: of the run.
        ranks: of the run.
        path: the checkpoint to go on from; None if the run begins anew, or has commits alone.
        goes_back: the checkpoint was given by name: later ones, and commits, are left behind, when
            the first step was made. A start that fails before leaves all as it was.
    """

    lineage: Lineage
    run_folder: Path
    ranks: Ranks
    path: Path | None = None
    goes_back: bool = False
    _noted: bool = False

    @classmethod
    def agreed(cls, options: TrainOptions, folder: RunFolder, ranks: Ranks) -> Branch:
        """What --resume means, as the first rank sees it.

        Raises ValueError, on all ranks, if a path was given and has no checkpoint.
        """
        found = ranks.from_first(lambda: _resumption(options, folder.path))
        return cls(found[0], folder.path, ranks, *found[1:])

    def note(self) -> None:
        """After the first step of a run that goes back, the new branch begins. All ranks call
        it."""
        if self.goes_back and not self._noted:
            self._noted = True
            self.lineage = self.ranks.from_first(self._begin)

    def _begin(self) -> Lineage:
        """Moves what is left away, and then tells the run folder: a crash between them leaves the
        run where it was, but for checkpoints."""
        assert self.path is not None
        source, folder = self.path.resolve(), (self.run_folder / CHECKPOINTS_NAME).resolve()
        made = extra_of(source)["step"] if source.is_relative_to(folder) else -1
        lineage = Lineage(os.urandom(4).hex(), str(source), this_launch())
        left = self.run_folder / _LEFT_NAME / lineage.branch
        for each in latest_checkpoints(folder):
            if extra_of(each)["step"] > made:
                left.mkdir(parents=True, exist_ok=True)
                name = each.relative_to(folder).parts[0]
                (folder / name).rename(left / name)
        lineage.write(self.run_folder)
        return lineage


def _resumption(options: TrainOptions, run_folder: Path) -> tuple[Lineage, Path | None, bool]:
    """Lineage, path and goes_back of the Branch."""
    commits = options.commit_every is not None
    if options.resume is None:
        return Lineage(), None, False
    mine = run_folder / CHECKPOINTS_NAME
    if not options.resume:
        lineage = Lineage.read(run_folder)
        return lineage, _latest(mine, lineage, commits), False
    path = of_trainer(Path(options.resume))
    if is_checkpoint(path):
        # (A damaged file must not keep a run from going back: it is replaced.)
        with contextlib.suppress(ValueError):
            lineage = Lineage.read(run_folder)
            begun = str(path.resolve()), this_launch()
            if lineage.launch and (lineage.source, lineage.launch) == begun:  # and started again
                return lineage, _latest(mine, lineage, commits), False
        return Lineage(), path, True
    for parent in (path, path / CHECKPOINTS_NAME):
        run = parent.parent if parent.name == CHECKPOINTS_NAME else parent
        found = _latest(parent, Lineage.read(run), commits)
        if found is not None:
            return Lineage.read(run_folder), found, False
    raise ValueError(f"--resume {path} is no checkpoint, and has none in it")


def _latest(folder: Path, lineage: Lineage, commits: bool) -> Path | None:
    """The checkpoint in `folder` that the run has made last; before the first one, what its branch
    has begun from.

    Raises ValueError if that is not there, and the run has no `commits` either.
    """
    found = next(iter(latest_checkpoints(folder)), None)
    if found is not None or not lineage.source:
        return found
    source = Path(lineage.source)
    if is_checkpoint(source):
        return source
    if commits:
        return None
    raise ValueError(
        f"the run has gone back to {source}, which is not there any more, and has no checkpoint "
        f"since; give --resume one of those in {folder.parent / _LEFT_NAME}"
    )


def extra_of(path: Path) -> dict[str, Any]:
    """The step and the data in a checkpoint's `extra`. Raises CheckpointError."""
    manifest = read_manifest(path)
    found: dict[str, Any] = {"step": manifest.step}
    if manifest.ranks:
        packed = manifest.ranks[0].get("extra") if isinstance(manifest.ranks[0], dict) else None
        for name in ("step", DATA_KEY):
            if isinstance(packed, dict) and name in packed:
                found[name] = packed[name]
    return found
