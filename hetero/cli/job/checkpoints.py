"""The checkpoints and commits of a run: made beside training, and gone on from."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import hetero
from hetero.checkpoint.folder import is_checkpoint
from hetero.checkpoint.manifest import read_manifest
from hetero.cli.job.job import Job
from hetero.cli.job.options import TrainOptions
from hetero.cli.job.ranks import Ranks
from hetero.cli.job.run_folder import RunFolder

FOLDER_NAME = "checkpoints"  # in the run folder


def run_folder_to_resume(options: TrainOptions) -> str | None:
    """The run folder that --resume goes on in; None for a new one.

    That is --run-dir, or the run that the checkpoint is of, or the newest one in `runs`.
    """
    if options.resume is None or options.run_dir is not None:
        return options.run_dir
    if options.resume:
        path = Path(options.resume)
        for folder in (path, path.parent, path.parent.parent):
            if RunFolder.has_run(folder) and (folder / FOLDER_NAME).is_dir():
                return str(folder)
        return None
    runs = [each for each in Path("runs").glob("*") if RunFolder.has_run(each)]
    return str(max(runs, key=RunFolder.written_s)) if runs else None


def checkpoint_to_resume(options: TrainOptions, folder: RunFolder) -> Path | None:
    """The checkpoint that --resume means; None if the run has none yet and begins anew.

    Raises ValueError if a path was given and has none.
    """
    if options.resume is None:
        return None
    if not options.resume:
        return hetero.latest_checkpoint(folder.path / FOLDER_NAME)
    path = Path(options.resume)
    if is_checkpoint(path):
        return path
    for parent in (path, path / FOLDER_NAME):
        found = hetero.latest_checkpoint(parent)
        if found is not None:
            return found
    raise ValueError(f"--resume {path} is no checkpoint, and has none in it")


class Checkpoints:
    """Saves a job's checkpoints, and loads the one that it goes on from."""

    def __init__(self, job: Job, folder: RunFolder) -> None:
        self._job = job
        self._folder = folder.path / FOLDER_NAME
        self._last: hetero.Save | None = None
        self._commit: hetero.Save | None = None
        self.terminated = False  # SIGTERM has come

    @property
    def saved(self) -> str | None:
        """The last checkpoint that was begun."""
        return None if self._last is None else str(self._folder / self._last.path.name)

    @property
    def _objects(self) -> dict[str, Any]:
        return {"scheduler": self._job.scheduler, "data": self._job.task.data}

    def resume(self, path: Path | None) -> tuple[int, Path | None]:
        """Goes on from a checkpoint, or from the run's last commit if that is later.

        Returns the number of steps that were made, and from what; 0 and None for a new run. Raises
        ValueError if there are more than the run is to make.
        """
        job, found = self._job, self._last_commit()
        asked = path is not None and path == Path(job.options.resume or "")
        if path is not None and (found is None or asked or read_manifest(path).step > found.step):
            found = hetero.load(path, job.model, job.optimizer, extra=self._objects)
        if found is None:
            return 0, None
        made = int(found.extra["step"])
        if made >= job.options.steps:
            raise ValueError(
                f"{found.path} has all {made} steps; to go on from it ask for more than "
                f"{job.options.asked_steps}"
            )
        return made, found.path

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
        if not self._keeps_state:
            return False
        # One rank alone may have got the signal, and all end with it.
        self.terminated = any(self._job.ranks.gather(self.terminated))
        is_last = self.terminated or step == options.steps
        if options.commit_every is not None and (step % options.commit_every == 0 or is_last):
            self._commit = hetero.commit(self._job.model, extra={**self._objects, "step": step})
        if options.save_every is not None and (step % options.save_every == 0 or is_last):
            self._save(step)
        return self.terminated

    @property
    def _keeps_state(self) -> bool:
        options = self._job.options
        return options.save_every is not None or options.commit_every is not None

    def _save(self, step: int) -> None:
        job = self._job
        self._last = hetero.save(
            self._folder / f"step-{step:06}",
            job.model,
            job.optimizer,
            extra={**self._objects, "step": step},
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

    @contextmanager
    def noticing_sigterm(self) -> Iterator[None]:
        """Inside the block SIGTERM ends the run after the step that is under way, saved."""
        if not self._keeps_state:
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            self.terminated = True

        before = signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


def agreed_checkpoint(options: TrainOptions, folder: RunFolder, ranks: Ranks) -> Path | None:
    """checkpoint_to_resume() as the first rank sees it. Raises ValueError on all ranks."""
    found = ranks.from_first(lambda: str(checkpoint_to_resume(options, folder) or ""))
    return Path(found) if found else None
