"""The training loop: takes a job through its steps, and measures each."""

from __future__ import annotations

import math
from contextlib import nullcontext

import hetero
from hetero.job.checkpoints import Checkpoints
from hetero.job.job import Job, open_job
from hetero.job.options import TrainOptions
from hetero.job.ranks import ALONE, Ranks
from hetero.job.run import Observer, TrainingRun, failing_of_the_run, require_number
from hetero.job.run_folder import RunFolder
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
                    run.step(one_step(job, step))
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
