"""The training loop: takes a job through its steps, measures each, and says how the run ended."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace

import torch

import hetero
from hetero.job.checkpoints import Branch, Checkpoints, sigterm_calls
from hetero.job.job import Job, complete, open_job
from hetero.job.options import TrainOptions
from hetero.job.ranks import ALONE, Ranks
from hetero.job.run_folder import RunFolder
from hetero.reporting.report import SHOWN_STEPS, StepsRecording
from hetero.reporting.run_record import PARTS, RunFacts, RunRecord, StepPoint
from offload import timeline


class Observer:
    """Is told of a run as it goes on, to show it; this one shows nothing."""

    def begin(self, setting: RunFacts) -> None: ...
    def step(self, point: StepPoint) -> None: ...
    def end(self) -> None: ...


class DivergedError(RuntimeError):
    """The loss is no number any more."""


# What ends a run that has begun, and is told in its result.
END_A_RUN = (KeyboardInterrupt, DivergedError, hetero.HeteroError, OSError, MemoryError)


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
    branch = Branch.agreed(options, folder, ranks)
    with open_job(options, folder, ranks) as job:
        checkpoints = Checkpoints(job, folder, branch)
        made, found = checkpoints.resume()
        notes = list(job.setting.notes)
        if options.resume is not None:
            folder.go_on_after(made)
            if found is None:
                notes.append("--resume found no checkpoint, so the run began anew")
            else:
                notes += [f"resumed after step {made} from {found.path}", *found.notes]
        result = RunRecord(job.setting, notes=tuple(notes))
        observer.begin(job.setting)
        try:
            with sigterm_calls(checkpoints.note_sigterm, checkpoints.keeps_state):
                _run_steps(job, folder, observer, result, checkpoints, made)
                checkpoints.finish()
            if checkpoints.terminated:
                result.status = "terminated"
            else:
                with failing_of_the_run():
                    result.model_folder = job.task.finish(job.model, folder)
            result.checkpoint = checkpoints.saved
            complete(result, job.engine, ranks)
        except END_A_RUN as error:
            note_end(result, error)
            checkpoints.settle()
        finally:
            observer.end()
        job.recorder.complete(result)
    return result


def note_end(result: RunRecord, error: BaseException) -> None:
    """Notes which of END_A_RUN has ended the run."""
    if isinstance(error, Exception):
        result.status, result.failure, result.error = "failed", error, str(error)
    else:
        result.status = "interrupted"


@contextmanager
def failing_of_the_run() -> Iterator[None]:
    """Raises a ValueError of the block, which comes after training, as a StoreError: it is a
    failure of the run, as a full disk is, and not of what was asked for."""
    try:
        yield
    except ValueError as error:
        raise hetero.StoreError(str(error)) from error


def _run_steps(
    job: Job,
    folder: RunFolder,
    observer: Observer,
    result: RunRecord,
    checkpoints: Checkpoints,
    made: int,
) -> None:
    """Makes the steps after those that were `made`; of the last ones there is a timeline."""
    job.recorder.begin()
    first = max(1, job.options.steps - made - SHOWN_STEPS + 1)
    with closing(StepsRecording(job.engine, first if job.ranks.leads else None)) as recording:
        for step in range(made + 1, job.options.steps + 1):
            point = one_step(job, step)
            result.add(point)
            folder.append_metrics(point.as_dict(job.recorder.begin_s))
            observer.step(point)
            recording.end_step(step - made)
            if checkpoints.after_step(step):
                break
        job.engine.synchronize()  # an interval is known when it ends
    result.timeline = recording.timeline


class _Stopwatch:
    """Its `span(name)` adds the time of its block to `seconds[name]`.

    On a GPU the work of a block is over only when the device is idle, so it is waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start_s = self._now_s()
        yield
        end_s = self._now_s()
        self.seconds[name] += end_s - start_s
        timeline.note("compute", start_s, end_s, name=name)

    def _now_s(self) -> float:
        torch.get_device_module(self._device).synchronize(self._device)
        return time.perf_counter()


def one_step(job: Job, step: int) -> StepPoint:
    """Makes step number `step` (from 1) of a run, and measures it."""
    options = job.options
    clock = _Stopwatch(job.device)
    loss_sum = 0.0
    for micro_batch in range(1, options.accumulate + 1):
        tokens = job.task.data.batch(options.batch_size).to(job.device)
        with clock.span("forward"):
            loss = job.model(input_ids=tokens, labels=tokens).loss
            loss_sum += loss.item() / options.accumulate
        # Updates may be submitted in the last backward only; without them nothing need be said.
        more = options.overlap.in_backward and micro_batch < options.accumulate
        told = hetero.no_sync(job.model) if more else nullcontext()
        with clock.span("backward"), told:
            job.optimizer.backward(loss / options.accumulate)
    # All ranks learn here, before any of them updates, if one of them went astray.
    loss_mean = job.ranks.mean(loss_sum)
    require_number(loss_mean, step, options)
    lr = float(job.optimizer.param_groups[0]["lr"])
    grad_norm: float | None = None
    with clock.span("optimizer"):
        if options.clip > 0:
            norm = float(hetero.clip_grad_norm_(job.model.parameters(), options.clip))
            # Under fp16 an overflow is part of life: the step is skipped and the scale lowered.
            grad_norm = norm if math.isfinite(norm) else None
        job.optimizer.step()
        job.optimizer.zero_grad()
    job.scheduler.step()
    seconds = {name: clock.seconds[name] for name in PARTS}
    made = job.recorder.end_step(loss_mean, job.setting.tokens_per_step, seconds, step)
    return replace(made, grad_norm=grad_norm, lr=lr)


def require_number(loss: float, step: int, options: TrainOptions) -> None:
    """Raises DivergedError if the loss of the step is none."""
    if math.isfinite(loss):
        return
    advice = f"a smaller --lr (now {options.lr:g}) or more --warmup (now {options.warmup})"
    if options.clip == 0:
        advice += ", or --max-grad-norm 1"
    if options.dtype == "fp16":
        advice += ", or --dtype bf16 or fp32, whose range is wider"
    raise DivergedError(f"the loss became {loss} in step {step}; try {advice}")
