"""The training loop: takes a job through its steps, and says how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import hetero
from hetero.job.checkpoints import Checkpoints, agreed_resumption, sigterm_calls
from hetero.job.job import Job, open_job
from hetero.job.options import TrainOptions
from hetero.job.ranks import ALONE, Ranks
from hetero.job.result import Setting, TrainResult
from hetero.job.run_folder import RunFolder
from hetero.job.step import DivergedError, one_step
from hetero.reporting.run_record import StepPoint
from offload.timeline import Timeline, record

PICTURED_STEPS = 2  # one step's writes go on during the next one's forward


class Observer(Protocol):
    """Is told of a run as it goes on, to show it."""

    def begin(self, setting: Setting) -> None: ...
    def step(self, point: StepPoint) -> None: ...
    def end(self) -> None: ...


def train(
    options: TrainOptions,
    folder: RunFolder,
    observer: Observer,
    ranks: Ranks = ALONE,
) -> TrainResult:
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
    resumption = agreed_resumption(options, folder, ranks)
    with open_job(options, folder, ranks) as job:
        notes = list(job.setting.notes)
        checkpoints = Checkpoints(job, folder, resumption)
        made, found = checkpoints.resume()
        if options.resume is not None:
            folder.go_on_after(made)
            notes += resumption_notes(found, made)
        result = TrainResult(job.setting, predicted=job.predicted, notes=notes)
        observer.begin(job.setting)
        try:
            with sigterm_calls(checkpoints.note_sigterm, checkpoints.keeps_state):
                _run_steps(job, folder, observer, result, checkpoints, made)
                checkpoints.finish()
            if checkpoints.terminated:
                result.status = "terminated"
            else:
                result.model_folder = _finish(job, folder)
            result.checkpoint = checkpoints.saved
            job.complete(result, ranks)
        except END_A_RUN as error:
            note_end(result, error)
            checkpoints.settle()
        finally:
            observer.end()
        job.measure(result)
    return result


# What ends a run that has begun, and is told in its result.
END_A_RUN = (KeyboardInterrupt, DivergedError, hetero.HeteroError, OSError, MemoryError)


def note_end(result: TrainResult, error: BaseException) -> None:
    """Notes which of END_A_RUN has ended the run."""
    if isinstance(error, Exception):
        result.status, result.failure = "failed", error
    else:
        result.status = "interrupted"


def resumption_notes(found: hetero.Checkpoint | None, made: int) -> list[str]:
    """What --resume found, and has to say of it; `made`: how many steps that has."""
    if found is None:
        return ["--resume found no checkpoint, so the run began anew"]
    return [f"resumed after step {made} from {found.path}", *found.notes]


def _finish(job: Job, folder: RunFolder) -> str | None:
    """Has the task write its result. Raises StoreError, OSError."""
    try:
        return job.task.finish(job.model, folder)
    except ValueError as error:  # after training it is a failure of the run, as a full disk is
        raise hetero.StoreError(str(error)) from error


def _run_steps(
    job: Job,
    folder: RunFolder,
    observer: Observer,
    result: TrainResult,
    checkpoints: Checkpoints,
    made: int,
) -> None:
    job.recorder.begin()

    def make(steps: range) -> None:
        for step in steps:
            point = one_step(job, step)
            result.add(point)
            folder.append_metrics(point.as_dict(job.recorder.begin_s))
            observer.step(point)
            if checkpoints.after_step(step):
                return

    end = job.options.steps + 1
    pictured = max(made + 1, end - PICTURED_STEPS)
    make(range(made + 1, pictured))
    if checkpoints.terminated:
        return
    if not job.ranks.leads:
        make(range(pictured, end))
    else:
        result.timeline = record_steps(job.engine, partial(make, range(pictured, end)))


def record_steps(engine: hetero.Engine, make_steps: Callable[[], None]) -> Timeline:
    """The timeline of the process while `make_steps` runs."""
    with record() as recording:
        engine.ledger.sample()
        make_steps()
        end_s = time.perf_counter()
        # An interval is known when it ends.
        engine.synchronize()
    # What the last step's writes still do afterwards would be seen again in the step after it.
    return recording.timeline.between(recording.timeline.begin_s, end_s)
