"""The checkpoints and commits of a run: made beside training, and gone on from."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hetero
from hetero.checkpoint.folder import is_checkpoint, latest_checkpoints, of_trainer
from hetero.checkpoint.manifest import read_manifest
from hetero.job.job import Job
from hetero.job.lineage import KEY, Branch, Lineage
from hetero.job.options import TrainOptions
from hetero.job.ranks import Ranks
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


@dataclass(frozen=True)
class Resumption:
    """What --resume means.

    Attributes:
        path: the checkpoint; None if the run has none yet and begins anew, or has commits alone.
        goes_back: the checkpoint was given by name: later ones, and commits, are left behind.
        lineage: of the run in the run folder, before.
    """

    path: Path | None
    goes_back: bool
    lineage: Lineage


def resumption(options: TrainOptions, folder: RunFolder) -> Resumption:
    """What --resume means. Raises ValueError if a path was given and has no checkpoint."""
    if options.resume is None:
        return Resumption(None, False, Lineage())
    if not options.resume:
        return Resumption(*_latest(folder.path / CHECKPOINTS_NAME, folder.path), _lineage(folder))
    path = of_trainer(Path(options.resume))
    if is_checkpoint(path):
        # (A damaged file must not keep a run from going back: it is replaced.)
        with contextlib.suppress(ValueError):
            lineage = Lineage.read(folder.path)
            if lineage.was_begun_by(path):
                return Resumption(*_latest(folder.path / CHECKPOINTS_NAME, folder.path), lineage)
        return Resumption(path, True, Lineage())
    for parent in (path, path / CHECKPOINTS_NAME):
        run = parent.parent if parent.name == CHECKPOINTS_NAME else parent
        found, _ = _latest(parent, run)
        if found is not None:
            return Resumption(found, False, _lineage(folder))
    raise ValueError(f"--resume {path} is no checkpoint, and has none in it")


def _lineage(folder: RunFolder) -> Lineage:
    return Lineage.read(folder.path)


def _latest(folder: Path, run_folder: Path) -> tuple[Path | None, bool]:
    """The checkpoint in `folder` that the run has made last, on the branch that it is on; before
    the first one, what that branch has begun from. And that it was not given by name.

    Raises ValueError if there are checkpoints, and none that the run can go on from.
    """
    lineage = Lineage.read(run_folder)
    checkpoints = latest_checkpoints(folder)
    found = next((path for path in checkpoints if lineage.has(extra_of(path))), None)
    if found is not None or not lineage.source:
        return found, False
    source = Path(lineage.source)
    if is_checkpoint(source):
        return source, False
    if not checkpoints:
        return None, False  # (commits alone)
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
        for name in ("step", KEY, DATA_KEY):
            if isinstance(packed, dict) and name in packed:
                found[name] = packed[name]
    return found


class Checkpoints:
    """Saves a job's checkpoints, and loads the one that it goes on from."""

    def __init__(self, job: Job, folder: RunFolder, resumption: Resumption) -> None:
        self._job = job
        self._folder = folder.path / CHECKPOINTS_NAME
        self._resumption = resumption
        self._branch = Branch(resumption.lineage, folder.path, job.ranks)
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
        job, path = self._job, self._resumption.path
        commit = found = self._last_commit()
        lineage = self._branch.lineage
        if found is not None and (self._resumption.goes_back or not lineage.has(found.extra)):
            found = None
        if path is not None and (found is None or _step_of(path) > found.extra["step"]):
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
        self._branch.go_on_from(found.extra, found.path, self._resumption.goes_back)
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
        options = self._job.options
        if not self.keeps_state:
            return False
        # One rank alone may have got the signal, and all end with it.
        self.terminated = any(self._job.ranks.gather(self._signalled))
        self._branch.note()
        is_last = self.terminated or step == options.steps
        if options.commit_every is not None and (step % options.commit_every == 0 or is_last):
            self._commit = hetero.commit(self._job.model, extra=self._extra(step))
        if options.save_every is not None and (step % options.save_every == 0 or is_last):
            self._save(step)
        return self.terminated

    def _extra(self, step: int) -> dict[str, Any]:
        return {**self._objects, "step": step, **self._branch.lineage.as_extra}

    @property
    def keeps_state(self) -> bool:
        """Whether the run saves or commits."""
        options = self._job.options
        return options.save_every is not None or options.commit_every is not None

    def _save(self, step: int) -> None:
        job = self._job
        self._last = hetero.save(
            self._folder / f"step-{step:06}",
            job.model,
            job.optimizer,
            extra=self._extra(step),
            blocking=False,
            keep=job.options.keep,
        )

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


def _step_of(path: Path) -> int:
    return int(extra_of(path)["step"])


def agreed_resumption(options: TrainOptions, folder: RunFolder, ranks: Ranks) -> Resumption:
    """resumption() as the first rank sees it. Raises ValueError on all ranks."""
    return ranks.from_first(lambda: resumption(options, folder))
