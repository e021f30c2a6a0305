"""The training loop: takes a job through its steps, measures each, and keeps checkpoints and
commits beside them."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from typing import Any

import hetero
from hetero.job.job import Job, open_job
from hetero.job.options import TrainOptions
from hetero.job.ranks import ALONE, Ranks
from hetero.job.resume import extra_of
from hetero.job.run import Observer, TrainingRun, failing_of_the_run, require_number
from hetero.job.run_folder import CHECKPOINTS_NAME, RunFolder
from hetero.reporting.recorder import SHOWN_STEPS
from hetero.reporting.run_record import RunRecord, StepPoint


def train(
    options: TrainOptions,
    folder: RunFolder,
    observer: Observer,
    ranks: Ranks = ALONE,
) -> RunRecord:
    """Trains as the options say; all ranks must call it with the same options.

    Metrics are written to `folder` step by step, and the run is shown by `observer`.

    Returns:
        What was measured. Its status and failure say what ended the run early, Ctrl-C included.

    Raises:
        ValueError, hetero.HeteroError: before the first step, for options that cannot work.
    """
    if options.save_every is not None:
        folder.require_shared("--save-every")
    elif options.save_model:
        folder.require_shared("the trained model (without it: --no-save-model)")
    run = TrainingRun(options, folder, observer, ranks)
    with open_job(options, folder, ranks) as job:
        checkpoints = Checkpoints(job, run)
        made, notes = checkpoints.resume()
        shown = max(1, options.steps - made - SHOWN_STEPS + 1) if ranks.leads else None
        run.begin(job.recorder, made, notes, timeline_from=shown)
        with run.under_way():
            with run.sigterm_noted(), checkpoints:
                for step in range(made + 1, options.steps + 1):
                    run.step(one_step(job, step), run_id=checkpoints.run_id)
                    if checkpoints.after_step(step):
                        break
                job.engine.synchronize()  # an interval is known when it ends
                job.recorder.close()
            if not run.terminated:
                with failing_of_the_run():
                    run.record.model_folder = job.task.finish(job.model, folder)
            run.record.checkpoint = checkpoints.saved
            run.complete(job.engine)
        return job.recorder.complete()


def one_step(job: Job, step: int) -> StepPoint:
    """Makes step number `step` (from 1) of a run, and measures it."""
    options = job.options
    loss_sum = 0.0
    for micro_batch in range(1, options.accumulate + 1):
        tokens = job.task.data.batch(options.batch_size).to(job.device)
        loss = job.model(input_ids=tokens, labels=tokens).loss
        loss_sum += loss.item() / options.accumulate
        # Updates may be submitted in the last backward only; without them nothing need be said.
        more = options.overlap.in_backward and micro_batch < options.accumulate
        with hetero.no_sync(job.model) if more else nullcontext():
            job.optimizer.backward(loss / options.accumulate)
    # All ranks learn here, before any of them updates, if one of them went astray.
    loss_mean = job.ranks.mean(loss_sum)
    require_number(loss_mean, step, options)
    lr = float(job.optimizer.param_groups[0]["lr"])
    grad_norm: float | None = None
    if options.clip > 0:
        norm = float(hetero.clip_grad_norm_(job.model.parameters(), options.clip))
        # Under fp16 an overflow is part of life: the step is skipped and the scale lowered.
        grad_norm = norm if math.isfinite(norm) else None
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.scheduler.step()
    tokens_made = options.tokens_per_step * job.ranks.count
    return job.recorder.end_step(loss_mean, tokens_made, step, grad_norm, lr)


class Checkpoints:
    """Saves a job's checkpoints, and loads the one that it goes on from.

    Attributes:
        run_id: 32 hexadecimal digits, which no other run has; metrics and commits say it.
    """

    def __init__(self, job: Job, run: TrainingRun) -> None:
        self._job = job
        self._run = run
        self._folder = run.folder.path / CHECKPOINTS_NAME
        self._last: hetero.Save | None = None
        self._commit: hetero.Save | None = None
        new_id = run.ranks.from_first(lambda: os.urandom(16).hex())
        self.run_id: str = run.beginning.run_id or new_id

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
        beginning = self._run.beginning
        found = hetero.resume(self._job.model, extra=self._objects)
        if found is None:
            return None
        steps = found.extra["step"]
        if not beginning.takes_commit:
            raise ValueError(
                f"{found.path} has the state of a run that made {steps} steps; --resume goes on "
                f"from there, and a new run needs another --nvme-path or --run-dir"
            )
        of_run = found.extra.get("run_id")  # (None of an earlier hetero)
        if beginning.run_id is not None and of_run not in (None, beginning.run_id):
            folder = found.extra["run_dir"]
            raise ValueError(
                f"{found.path} has the state of the run in {folder}, which made {steps} steps, and "
                f"--run-dir {self._run.folder.path} has another run; give --run-dir {folder}, or "
                f"the --nvme-path that this run began with, or an empty one"
            )
        self.run_id = of_run or self.run_id
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
            of_run = {"run_id": self.run_id, "run_dir": str(run.folder.path.resolve())}
            self._commit = hetero.commit(job.model, extra={**extra, **of_run})
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
