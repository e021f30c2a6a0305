"""The options of a training job, and its steps, made and timed several in a row."""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

from hetero.job.job import Job
from hetero.job.loop import one_step
from hetero.job.models import wanted_vocab_size
from hetero.job.options import TrainOptions, add_train_arguments
from hetero.reporting.run_record import PARTS, StepPoint

QUIET_S = 0.2
# Norms that no gradient reaches, and that every one exceeds.
NEVER_CLIPS, ALWAYS_CLIPS = 1e30, 1e-30
# Until updates during backward have followed a change of the share (hetero's FactorPrediction).
WARM_UP_STEPS = 8
# Of jobs that are measured: steps that are alike, computed by the CPU.
DEFAULTS = {
    "seq_len": 256,
    "batch_size": 1,
    "lr": 1e-4,
    "warmup": 0,
    "schedule": "constant",
    "backend": "cpu",
    "save_model": False,
}


def add_job_options(parser: argparse.ArgumentParser, **defaults: object) -> None:
    """Adds the options of `hetero train`, with DEFAULTS and a benchmark's own `defaults`."""
    add_train_arguments(parser, {**DEFAULTS, **defaults})


def job_options(arguments: argparse.Namespace, **changed: Any) -> TrainOptions:
    """What was parsed, but for what is `changed`; a model by name has its published vocabulary."""
    values = {**vars(arguments), **changed}
    values["vocab_size"] = wanted_vocab_size(values["model"], values["vocab_size"])
    return TrainOptions.from_namespace(argparse.Namespace(**values))


class JobSteps:
    """The training steps of a job, in samples of several in a row."""

    def __init__(self, job: Job, clipped: float | None = None) -> None:
        """`clipped`: the share of steps whose gradients are clipped, evenly spread, whatever their
        norms; None: those that the job's option clips."""
        self._job = job
        self._clipped = clipped
        self._made = 0
        # Of the disk's bytes of the last sample.
        self.read_share = 0.5

    def warm_up(self) -> None:
        """Makes steps until those that follow are like those of a long training."""
        for _ in range(WARM_UP_STEPS):
            self.one()

    def one(self) -> StepPoint:
        """Makes a step."""
        self._made += 1
        job = self._job
        if self._clipped is not None:
            clips = int(self._made * self._clipped) > int((self._made - 1) * self._clipped)
            norm = ALWAYS_CLIPS if clips else NEVER_CLIPS
            job = replace(job, options=replace(job.options, clip=norm))
        return one_step(job, self._made)

    def sample(self, steps: int) -> dict[str, float]:
        """Means of `steps` steps after one that is not counted; then all is written."""
        self.one()
        before = self._job.engine.traffic
        begin_s = time.perf_counter()
        made = [self.one() for _ in range(steps)]
        seconds = time.perf_counter() - begin_s
        after = self._job.engine.traffic
        self.wait_until_quiet()
        moved = {
            name: (getattr(after, name) - getattr(before, name)) / steps
            for name in ("h2d", "d2h", "disk_read", "disk_write")
        }
        nvme = moved["disk_read"] + moved["disk_write"]
        self.read_share = moved["disk_read"] / nvme if nvme else 0.5
        return {
            "step_s": seconds / steps,
            **{f"{part}_s": statistics.mean(step.parts_s[part] for step in made) for part in PARTS},
            **moved,
        }

    def wait_until_quiet(self) -> None:
        """Waits until the engine moves nothing in the background, which would slow down what is
        measured next."""
        engine = self._job.engine
        engine.synchronize()
        before = None
        while before != engine.traffic:  # of what is read ahead
            before = engine.traffic
            time.sleep(QUIET_S)
