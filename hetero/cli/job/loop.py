"""The training loop: takes a job through its steps and measures every one."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from functools import partial
from typing import Protocol

import hetero
from hetero.cli.job.job import Job, open_job
from hetero.cli.job.metrics import LINKS, MemorySample, StepMetrics
from hetero.cli.job.options import TrainOptions
from hetero.cli.job.process_memory import peak_rss_bytes, rss_bytes
from hetero.cli.job.ranks import ALONE, Ranks
from hetero.cli.job.result import Setting, TrainResult
from hetero.cli.job.run_folder import RunFolder
from hetero.cli.job.step_timeline import PICTURED_STEPS, record_steps
from hetero.cli.job.stopwatch import Stopwatch


class DivergedError(RuntimeError):
    """The loss is no number any more."""


class Observer(Protocol):
    """Who watches a run."""

    def begin(self, setting: Setting) -> None: ...
    def step(self, metrics: StepMetrics) -> None: ...
    def end(self) -> None: ...


def train(
    options: TrainOptions, folder: RunFolder, observer: Observer, ranks: Ranks = ALONE
) -> TrainResult:
    """Runs the main job; all ranks must call it with the same options.

    Options that cannot work raise ValueError or hetero.HeteroError before the first step. What
    ends the run later, Ctrl-C included, is told by the result's status and failure.
    """
    with open_job(options, folder, ranks) as job:
        result = TrainResult(job.setting)
        observer.begin(job.setting)
        try:
            _run_steps(job, folder, observer, result)
            result.placed = job.placed()
            result.peak_rss_by_rank_bytes = [int(n) for n in ranks.gather(peak_rss_bytes())]
        except KeyboardInterrupt:
            result.status = "interrupted"
        except (DivergedError, hetero.HeteroError, OSError, MemoryError) as error:
            result.status = "failed"
            result.failure = error
        finally:
            observer.end()
        result.peak_managed_bytes = dict(job.engine.ledger.peak_bytes)
        result.peak_rss_bytes = peak_rss_bytes()
        result.peak_rss_by_rank_bytes = result.peak_rss_by_rank_bytes or [result.peak_rss_bytes]
    return result


def _run_steps(job: Job, folder: RunFolder, observer: Observer, result: TrainResult) -> None:
    start_s = time.perf_counter()

    def make(steps: range) -> None:
        for step in steps:
            metrics = one_step(job, step, start_s)
            result.steps.append(metrics)
            folder.append_metrics(metrics.as_dict())
            observer.step(metrics)

    end = job.options.steps + 1
    pictured = max(1, end - PICTURED_STEPS)
    make(range(1, pictured))
    if job.options.timeline is None or not job.ranks.leads:
        make(range(pictured, end))
    else:
        result.timeline = record_steps(job.engine, partial(make, range(pictured, end)))


def one_step(job: Job, step: int, start_s: float) -> StepMetrics:
    """Makes step number `step` (from 1) of a run that began at `start_s`, and measures it."""
    options = job.options
    clock = Stopwatch(job.device)
    before, gather_wait_s = _traffic_bytes(job), _gather_wait_s(job)
    memory: list[MemorySample] = []
    loss_sum = 0.0
    for micro_batch in range(1, options.accumulate + 1):
        tokens = job.corpus.batch(options.batch_size).to(job.device)
        with clock.span("forward"):
            loss = job.model(input_ids=tokens, labels=tokens).loss
            loss_sum += loss.item()
        memory.append(_memory_sample(job, start_s))
        # Updates may be submitted in the last backward only; without them nothing need be said.
        more = options.overlap.in_backward and micro_batch < options.accumulate
        told = hetero.no_sync(job.model) if more else nullcontext()
        with clock.span("backward"), told:
            job.optimizer.backward(loss / options.accumulate)
        memory.append(_memory_sample(job, start_s))
    # All ranks learn here, before any of them updates, if one of them went astray.
    loss_mean = job.ranks.mean(loss_sum / options.accumulate)
    _require_number(loss_mean, step, options)
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
    memory.append(_memory_sample(job, start_s))
    after = _traffic_bytes(job)
    return StepMetrics(
        step=step,
        loss=loss_mean,
        grad_norm=grad_norm,
        lr=lr,
        step_s=clock.total_s(),
        forward_s=clock.seconds["forward"],
        backward_s=clock.seconds["backward"],
        optimizer_s=clock.seconds["optimizer"],
        tokens=job.setting.tokens_per_step,
        traffic_bytes={link: after[link] - before[link] for link in LINKS},
        gather_wait_s=_gather_wait_s(job) - gather_wait_s,
        memory=tuple(memory),
    )


def _require_number(loss: float, step: int, options: TrainOptions) -> None:
    if math.isfinite(loss):
        return
    advice = f"a smaller --lr (now {options.lr:g}) or more --warmup (now {options.warmup})"
    if options.clip == 0:
        advice += ", or --clip 1"
    if options.dtype == "fp16":
        advice += ", or --dtype bf16 or fp32, whose range is wider"
    raise DivergedError(f"the loss became {loss} in step {step}; try {advice}")


def _traffic_bytes(job: Job) -> dict[str, int]:
    traffic = job.engine.traffic
    return {link: int(getattr(traffic, link)) for link in LINKS}


def _gather_wait_s(job: Job) -> float:
    return float(job.engine.gather_wait_s)


def _memory_sample(job: Job, start_s: float) -> MemorySample:
    return MemorySample(
        time_s=time.perf_counter() - start_s,
        managed_bytes=dict(job.engine.ledger.in_use_bytes),
        rss_bytes=rss_bytes(),
    )
