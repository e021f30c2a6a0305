"""One optimizer step of a job, made and measured."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

import hetero
from hetero.job.job import Job
from hetero.job.options import TrainOptions
from hetero.reporting.run_record import PARTS, StepPoint
from offload import timeline


class DivergedError(RuntimeError):
    """The loss is no number any more."""


class Stopwatch:
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
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def one_step(job: Job, step: int) -> StepPoint:
    """Makes step number `step` (from 1) of a run, and measures it."""
    options = job.options
    clock = Stopwatch(job.device)
    loss_sum = 0.0
    batches = job.task.data.step(options.batch_size, options.accumulate)
    for micro_batch, batch in enumerate(batches, start=1):
        inputs = {name: tensor.to(job.device) for name, tensor in batch.inputs.items()}
        with clock.span("forward"):
            loss = job.model(**inputs).loss
            loss_sum += loss.item() / batch.divisor
        # Updates may be submitted in the last backward only; without them nothing need be said.
        more = options.overlap.in_backward and micro_batch < options.accumulate
        told = hetero.no_sync(job.model) if more else nullcontext()
        with clock.span("backward"), told:
            job.optimizer.backward(loss / batch.divisor)
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
    tokens = sum(batch.tokens for batch in batches)
    seconds = {name: clock.seconds[name] for name in PARTS}
    made = job.recorder.end_step(loss_mean, tokens, seconds, step)
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
