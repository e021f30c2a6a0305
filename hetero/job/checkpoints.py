"""The checkpoints and commits of `hetero train`, made beside training."""

from __future__ import annotations

from typing import Any

import hetero
from hetero.job.job import Job
from hetero.job.resume import extra_of
from hetero.job.run import TrainingRun
from hetero.job.run_folder import CHECKPOINTS_NAME


class Checkpoints:
    """Saves a job's checkpoints, and loads the one that it goes on from."""

    def __init__(self, job: Job, run: TrainingRun) -> None:
        self._job = job
        self._run = run
        self._folder = run.folder.path / CHECKPOINTS_NAME
        self._last: hetero.Save | None = None
        self._commit: hetero.Save | None = None

    @property
    def saved(self) -> str | None:
        """The last checkpoint that was begun."""
        return None if self._last is None else str(self._folder / self._last.path.name)

    @property
    def _objects(self) -> dict[str, Any]:
        return {"scheduler": self._job.scheduler, "data": self._job.task.data}

    def resume(self) -> tuple[int, list[str]]:
        """Goes on from a checkpoint, or from the run's last commit if that is later.

        Returns the number of steps that were made, and notes about what they were found in. Raises
        ValueError if there are more than the run is to make.
        """
        job, path = self._job, self._run.beginning.path
        found = self._last_commit()
        if path is not None and (found is None or extra_of(path)["step"] > found.extra["step"]):
            found = hetero.load(path, job.model, job.optimizer, extra=self._objects)
        if found is None:
            begins_anew = job.options.resume is not None
            return 0, ["--resume found no checkpoint, so the run began anew"] * begins_anew
        made = int(found.extra["step"])
        if made >= job.options.steps:
            raise ValueError(
                f"{found.path} has all {made} steps; to go on from it ask for more than "
                f"--max-steps {job.options.steps}"
            )
        return made, [f"resumed after step {made} from {found.path}", *found.notes]

    def _last_commit(self) -> hetero.Checkpoint | None:
        """The commit that the engine has brought back.

        Raises ValueError if it is of another run.
        """
        if self._job.options.commit_every is None:
            return None
        found = hetero.resume(self._job.model, extra=self._objects)
        if found is not None and not self._run.beginning.takes_commit:
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
        job, options, run = self._job, self._job.options, self._run
        is_due = run.ends_now() or step == options.steps
        extra = {**self._objects, "step": step}
        if options.commit_every is not None and (is_due or step % options.commit_every == 0):
            self._commit = hetero.commit(job.model, extra=extra)
        if options.save_every is not None and (is_due or step % options.save_every == 0):
            path, keep = self._folder / f"step-{step:06}", options.keep
            self._last = hetero.save(
                path, job.model, job.optimizer, extra=extra, blocking=False, keep=keep
            )
        return run.terminated

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Waits until the last ones are there. Raises what hetero.save() and commit() do; after
        another error that is a warning."""
        for each in (self._commit, self._last):
            if each is not None:
                each.wait() if error is None else each.settle()
