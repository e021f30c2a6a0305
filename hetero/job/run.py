"""A run of `hetero train` or `hetero finetune` while it goes on, whoever makes its steps."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

import hetero
from hetero.job.options import TrainOptions
from hetero.job.ranks import Ranks
from hetero.job.resume import find_beginning
from hetero.job.run_folder import CONFIG_NAME, RunFolder
from hetero.reporting.recorder import Recorder
from hetero.reporting.run_record import RunFacts, RunRecord, StepPoint
from offload.memory.process_memory import peak_resident_bytes


class Observer:
    """Is told of a run as it goes on, to show it; this one shows nothing."""

    def begin(self, setting: RunFacts) -> None: ...
    def step(self, point: StepPoint) -> None: ...
    def end(self) -> None: ...


class DivergedError(RuntimeError):
    """The loss is no number any more."""


# What ends a run that has begun, and is told in its record.
END_A_RUN = (
    *(KeyboardInterrupt, DivergedError, hetero.HeteroError),
    *(OSError, MemoryError, torch.OutOfMemoryError),
)


class TrainingRun:
    """Tells record, run folder and observer of each step, and ends the run at SIGTERM.

    Attributes:
        options, folder, ranks: of the run.
        beginning: what it goes on from, as the first rank sees it.
        recorder: of the engine's steps; there is none before begin().
        terminated: SIGTERM has come to a rank, as all know.
    """

    def __init__(
        self, options: TrainOptions, folder: RunFolder, observer: Observer, ranks: Ranks
    ) -> None:
        """Raises ValueError, on all ranks, as find_beginning() does."""
        self.options = options
        self.folder = folder
        self.ranks = ranks
        self.beginning = ranks.from_first(lambda: find_beginning(options, folder.path))
        self.recorder: Recorder
        self.terminated = False
        self._observer = observer
        self._begun = False
        self._signalled = False  # SIGTERM has come to this rank

    @property
    def record(self) -> RunRecord:
        """What is known of the run."""
        return self.recorder.record

    def begin(
        self, recorder: Recorder, made: int, notes: Sequence[str], timeline_from: int | None
    ) -> None:
        """The step after those that were `made` begins now; `notes` say what it goes on from, and a
        timeline begins with step `timeline_from` of those that come."""
        self.recorder, self._begun = recorder, True
        record = recorder.record
        record.facts = replace(record.facts, notes=(*record.facts.notes, *notes))
        record.notes = record.facts.notes
        self.folder.go_on_after(made)
        self.folder.write_json(CONFIG_NAME, self.options.as_dict())
        self._observer.begin(record.facts)
        recorder.begin(timeline_from)

    def step(self, point: StepPoint, **said: object) -> None:
        """A step was made; `said` is more of it, for its metrics."""
        self.folder.append_metrics({**said, **point.as_dict(self.recorder.begin_s)})
        self._observer.step(point)

    def ends_now(self) -> bool:
        """Whether the run ends after this step, which is kept whatever its number: SIGTERM came.
        All ranks call it after each step, before they keep anything of it."""
        if self.options.keeps_state:
            # One rank alone may have got the signal, and all end with it.
            self.terminated = any(self.ranks.numbers(self._signalled))
        return self.terminated

    def note_sigterm(self) -> None:
        """Ends the run after the step that is under way, saved."""
        self._signalled = True

    @contextmanager
    def sigterm_noted(self) -> Iterator[None]:
        """Inside the block SIGTERM calls note_sigterm(), and does nothing else; if state is
        kept."""
        if not self.options.keeps_state:
            yield
            return
        before = signal.signal(signal.SIGTERM, lambda *_: self.note_sigterm())
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """The block makes the steps and leaves the result; one of END_A_RUN that is raised after
        begin() ends it, and is in the record."""
        try:
            yield
        except END_A_RUN as error:
            if not self._begun:
                raise
            if isinstance(error, Exception):
                self.record.status, self.record.failure = "failed", error
                self.record.error = str(error)
            else:
                self.record.status = "interrupted"
        finally:
            if self._begun:
                self.recorder.close()
            self._observer.end()

    def complete(self, engine: hetero.Engine) -> None:
        """Adds to the record of a run that has not failed how it ended, what is noted of it then,
        and what each rank's process held at most. All ranks call it."""
        record = self.record
        if self.terminated:
            record.status = "terminated"
        notes = (*record.notes, *engine.notes, engine.watch.words())
        record.notes = tuple(dict.fromkeys(filter(None, notes)))
        peaks = self.ranks.gather(peak_resident_bytes())
        record.peak_rss_by_rank_bytes = [int(nbytes) for nbytes in peaks]


@contextmanager
def failing_of_the_run() -> Iterator[None]:
    """Raises a ValueError of the block, which comes after training, as a StoreError: it is a
    failure of the run, as a full disk is, and not of what was asked for."""
    try:
        yield
    except ValueError as error:
        raise hetero.StoreError(str(error)) from error


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
