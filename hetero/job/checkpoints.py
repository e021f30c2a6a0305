"""The checkpoints and commits of a run, made beside training, and which of them it goes on from.

A run that goes back to an earlier checkpoint leaves later ones behind, with larger numbers. So
each checkpoint and commit says on which branch it was made, and the run folder which branch is the
run's now.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import hetero
from hetero.checkpoint.folder import is_checkpoint, latest_checkpoints, of_trainer
from hetero.checkpoint.manifest import read_manifest
from hetero.job.job import Job
from hetero.job.options import TrainOptions
from hetero.job.ranks import Ranks
from hetero.job.run_folder import CHECKPOINTS_NAME, RunFolder

DATA_KEY = "run"  # in `extra` of checkpoints of `hetero finetune`: the data and steps of the run
_LINEAGE_NAME = "lineage.json"  # in the run folder
_LINEAGE_KEY = "lineage"  # in `extra` of checkpoints and commits
_FIRST = "0"


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
    """The branches that led to where a run is.

    Attributes:
        branches: by age, name and the last step that counts; None of the last one, which goes on.
        source: the checkpoint that the last branch has begun from; "" of the first branch.
        launch: the launch of ranks that has begun it (this_launch()).
    """

    branches: tuple[tuple[str, int | None], ...] = ((_FIRST, None),)
    source: str = ""
    launch: str = ""

    def has(self, extra: Mapping[str, Any]) -> bool:
        """Whether what was saved with `extra` is on these branches, before they were left."""
        name = _branches_of(extra)[-1][0]
        last = dict(self.branches).get(name, -1)
        return last is None or int(extra["step"]) <= last

    def begun_from(self, extra: Mapping[str, Any], source: Path) -> Lineage:
        """A new branch of the checkpoint `source` with this `extra`."""
        *older, (name, _) = _branches_of(extra)
        branches = (*older, (name, int(extra["step"])), (os.urandom(4).hex(), None))
        return Lineage(branches, str(source.resolve()), this_launch())

    @property
    def as_extra(self) -> dict[str, Any]:
        """For `extra` of a checkpoint."""
        return {_LINEAGE_KEY: [list(each) for each in self.branches]}

    @staticmethod
    def read(run_folder: Path) -> Lineage:
        """The run's; of a run that has never gone back its only branch. Raises ValueError."""
        path = run_folder / _LINEAGE_NAME
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            branches = tuple((str(name), last) for name, last in found["branches"])
            return Lineage(branches, str(found["source"]), str(found["launch"]))
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
        with new.open("w", encoding="utf-8") as stream:
            json.dump(vars(self), stream)
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(run_folder / _LINEAGE_NAME)


def _branches_of(extra: Mapping[str, Any]) -> list[tuple[str, int | None]]:
    """Those of a checkpoint; before there were branches all was on the first one."""
    return [(name, last) for name, last in extra.get(_LINEAGE_KEY, [(_FIRST, None)])]


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
        run_folder: is told of a new branch when the first step of it was made, before anything is
            kept; a start that fails before leaves nothing behind.
        ranks: of the run.
        path: the checkpoint to go on from; None if the run begins anew, or has commits alone.
        goes_back: the checkpoint was given by name: later ones, and commits, are left behind.
    """

    lineage: Lineage
    run_folder: Path
    ranks: Ranks
    path: Path | None = None
    goes_back: bool = False
    _is_new: bool = False

    @classmethod
    def agreed(cls, options: TrainOptions, folder: RunFolder, ranks: Ranks) -> Branch:
        """What --resume means, as the first rank sees it.

        Raises ValueError, on all ranks, if a path was given and has no checkpoint.
        """
        found = ranks.from_first(lambda: _resumption(options, folder.path))
        return cls(found[0], folder.path, ranks, *found[1:])

    def go_on_from(self, extra: Mapping[str, Any], source: Path) -> None:
        """The run goes on from the checkpoint or commit `source` with this `extra`; on a new branch
        if it goes back, or has left that one's."""
        if self.goes_back or not self.lineage.has(extra):
            self.lineage = self.lineage.begun_from(extra, source)
            self._is_new = True

    def note(self) -> None:
        """Tells the run folder of a new branch. All ranks call it."""
        if self._is_new:
            self._is_new = False
            self.lineage = self.ranks.from_first(lambda: self.lineage)
            if self.ranks.leads:
                self.lineage.write(self.run_folder)


def _resumption(options: TrainOptions, run_folder: Path) -> tuple[Lineage, Path | None, bool]:
    """Lineage, path and goes_back of the Branch."""
    if options.resume is None:
        return Lineage(), None, False
    mine = run_folder / CHECKPOINTS_NAME
    if not options.resume:
        return Lineage.read(run_folder), _latest(mine, run_folder), False
    path = of_trainer(Path(options.resume))
    if is_checkpoint(path):
        # (A damaged file must not keep a run from going back: it is replaced.)
        with contextlib.suppress(ValueError):
            lineage = Lineage.read(run_folder)
            begun = str(path.resolve()), this_launch()
            if lineage.launch and (lineage.source, lineage.launch) == begun:  # and started again
                return lineage, _latest(mine, run_folder), False
        return Lineage(), path, True
    for parent in (path, path / CHECKPOINTS_NAME):
        run = parent.parent if parent.name == CHECKPOINTS_NAME else parent
        found = _latest(parent, run)
        if found is not None:
            return Lineage.read(run_folder), found, False
    raise ValueError(f"--resume {path} is no checkpoint, and has none in it")


def _latest(folder: Path, run_folder: Path) -> Path | None:
    """The checkpoint in `folder` that the run has made last, on the branch that it is on; before
    the first one, what that branch has begun from.

    Raises ValueError if there are checkpoints, and none that the run can go on from.
    """
    lineage = Lineage.read(run_folder)
    checkpoints = latest_checkpoints(folder)
    found = next((path for path in checkpoints if lineage.has(extra_of(path))), None)
    if found is not None or not lineage.source:
        return found
    source = Path(lineage.source)
    if is_checkpoint(source):
        return source
    if not checkpoints:
        return None  # (commits alone)
    raise ValueError(
        f"{run_folder} has gone back to {source}, which is not there any more, and its checkpoints "
        f"are of the branch that was left; give --resume one of them"
    )


def extra_of(path: Path) -> dict[str, Any]:
    """The step, the branches and the data in a checkpoint's `extra`. Raises CheckpointError."""
    manifest = read_manifest(path)
    found: dict[str, Any] = {"step": manifest.step}
    if manifest.ranks:
        packed = manifest.ranks[0].get("extra") if isinstance(manifest.ranks[0], dict) else None
        for name in ("step", _LINEAGE_KEY, DATA_KEY):
            if isinstance(packed, dict) and name in packed:
                found[name] = packed[name]
    return found


class Checkpoints:
    """Saves a job's checkpoints, and loads the one that it goes on from."""

    def __init__(self, job: Job, folder: RunFolder, branch: Branch) -> None:
        self._job = job
        self._folder = folder.path / CHECKPOINTS_NAME
        self._branch = branch
        self._last: hetero.Save | None = None
        self._commit: hetero.Save | None = None
        self._signalled = False  # SIGTERM has come to this rank
        self.terminated = False  # SIGTERM has come to one of them, as all know

    @property
    def saved(self) -> str | None:
        """The last checkpoint that was begun."""
        return None if self._last is None else str(self._folder / self._last.path.name)

    @property
    def _objects(self) -> dict[str, Any]:
        return {"scheduler": self._job.scheduler, "data": self._job.task.data}

    def resume(self) -> tuple[int, hetero.Checkpoint | None]:
        """Goes on from a checkpoint, or from the run's last commit if that is later.

        Returns the number of steps that were made, and from what; 0 and None for a new run. Raises
        ValueError if there are more than the run is to make, or what was committed is of a branch
        that the run has left and nothing else is there.
        """
        job, branch, path = self._job, self._branch, self._branch.path
        commit = found = self._last_commit()
        if found is not None and (branch.goes_back or not branch.lineage.has(found.extra)):
            found = None
        if path is not None and (found is None or extra_of(path)["step"] > found.extra["step"]):
            found = hetero.load(path, job.model, job.optimizer, extra=self._objects)
        if found is None:
            if commit is not None:
                raise ValueError(
                    f"{commit.path} has step {commit.extra['step']} of a branch that the run has "
                    f"left, and what it went back to is not there; give --resume a checkpoint"
                )
            return 0, None
        made = int(found.extra["step"])
        if made >= job.options.steps:
            raise ValueError(
                f"{found.path} has all {made} steps; to go on from it ask for more than "
                f"--max-steps {job.options.steps}"
            )
        branch.go_on_from(found.extra, found.path)
        return made, found

    def _last_commit(self) -> hetero.Checkpoint | None:
        """The commit that the engine has brought back.

        Raises ValueError if the run is not to go on from anything.
        """
        if self._job.options.commit_every is None:
            return None
        found = hetero.resume(self._job.model, extra=self._objects)
        if found is not None and self._job.options.resume is None:
            raise ValueError(
                f"{found.path} has the state of a run that made {found.extra['step']} steps; "
                f"--resume goes on from there, and a new run needs another --nvme-path or --run-dir"
            )
        return found

    def after_step(self, step: int) -> bool:
        """Saves and commits if it is time to; returns whether the run is to end now, because of
        SIGTERM.

        All ranks call it.
        """
        job, options = self._job, self._job.options
        if not self.keeps_state:
            return False
        # One rank alone may have got the signal, and all end with it.
        self.terminated = any(job.ranks.gather(self._signalled))
        self._branch.note()
        is_last = self.terminated or step == options.steps
        extra = {**self._objects, "step": step, **self._branch.lineage.as_extra}
        if options.commit_every is not None and (step % options.commit_every == 0 or is_last):
            self._commit = hetero.commit(job.model, extra=extra)
        if options.save_every is not None and (step % options.save_every == 0 or is_last):
            path, keep = self._folder / f"step-{step:06}", options.keep
            self._last = hetero.save(
                path, job.model, job.optimizer, extra=extra, blocking=False, keep=keep
            )
        return self.terminated

    @property
    def keeps_state(self) -> bool:
        """Whether the run saves or commits."""
        options = self._job.options
        return options.save_every is not None or options.commit_every is not None

    def finish(self) -> None:
        """Waits until the last ones are there. Raises what hetero.save() and commit() do."""
        for each in (self._commit, self._last):
            if each is not None:
                each.wait()

    def settle(self) -> None:
        """Waits for the last ones while an error is being handled; warns of theirs."""
        for each in (self._commit, self._last):
            if each is not None:
                each.settle()

    def note_sigterm(self) -> None:
        """Ends the run after the step that is under way, saved."""
        self._signalled = True


@contextmanager
def sigterm_calls(note: Callable[[], None], saves: bool) -> Iterator[None]:
    """Inside the block SIGTERM calls `note`, and does nothing else; if the run `saves` state."""
    if not saves:
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: note())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
