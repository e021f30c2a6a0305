"""hetero.report(): a training loop's run on one page."""

from __future__ import annotations

import importlib.util
import os
import warnings
from pathlib import Path
from types import TracebackType

import torch

from hetero.api.access import engine_of
from hetero.reporting.recorder import FIRST_TIMELINE, Recorder, facts_of
from hetero.reporting.run_record import RunRecord
from hetero.runtime.engine import Engine

FILE_NAME = "report.html"


class Report:
    """Records the steps of a training loop, and writes a page about them at the end of its block.

    It is used as a context manager, and step() is called after each optimizer step. Of several
    ranks the first one writes, and the bytes on the page are its own.
    """

    def __init__(
        self, path: Path, engine: Engine, title: str, tokens_per_step: int | None = None
    ) -> None:
        """Nothing is recorded before the block begins; report() makes it."""
        self.path = path
        self._engine = engine
        self._title = title
        self._tokens = tokens_per_step
        everyone = engine.world.everyone
        self._leads = everyone is None or everyone.rank == 0
        self._recorder: Recorder | None = None

    def __enter__(self) -> Report:
        """Begins to record, on the first rank."""
        if self._leads:
            facts = facts_of(self._engine, self._title)
            self._recorder = Recorder(self._engine, facts, timeline_from=FIRST_TIMELINE)
        return self

    def step(self, loss: torch.Tensor | float | None = None, tokens: int | None = None) -> None:
        """Call it after each optimizer step: what came since the last call was one step.

        Args:
            loss: of the step, one number; without it the page has no losses. It is rank 0's that is
                shown. A tensor on a GPU is not waited for.
            tokens: how many the step was trained on, by all ranks together, if that differs from
                `tokens_per_step` or was not given there.
        """
        if self._recorder is None:
            return
        if isinstance(loss, torch.Tensor) and loss.numel() != 1:
            raise ValueError(
                f"report.step() takes a loss of one number, and got one of shape "
                f"{tuple(loss.shape)}; take its mean"
            )
        self._recorder.end_step(loss, self._tokens if tokens is None else tokens)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Writes the page, or warns if it has no step; an exception of the block is told there."""
        if self._recorder is None:
            return
        recorder, self._recorder = self._recorder, None
        recorder.close()
        try:
            record = recorder.complete()
            if record.points:
                self._write(record, error)
            elif error is None:
                warnings.warn(
                    f"no report {self.path} was written, because it has no steps: call its step() "
                    f"after each optimizer step",
                    stacklevel=2,
                )
        except Exception as other:
            if error is None:
                raise
            warnings.warn(f"no report {self.path} was written: {other}", stacklevel=2)

    def _write(self, record: RunRecord, error: BaseException | None) -> None:
        from hetero.reporting.page import write_page

        if error is not None:
            record.status, record.error = f"ended by {type(error).__name__}", str(error)
        write_page(record, self.path)


def report(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    *,
    title: str | None = None,
    tokens_per_step: int | None = None,
) -> Report:
    """A recorder for any training loop, which writes one HTML page about it.

    The page shows loss, memory by tier and kind beside the budgets, time and bytes moved over the
    steps, a step by resource, and a table of where state is, speed, and predicted against measured.
    It needs no network and no other file. docs/reports.md describes it.

        with hetero.report("run.html", model) as report:
            for batch in data:
                loss = model(batch)
                optimizer.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                report.step(loss)

    A step costs about 0.1 ms: some reads of counters; no message to other ranks, no transfer and no
    wait for a GPU. All ranks may call it; the first one records and writes.

    Args:
        path: an .html file, or a folder, in which it is `report.html`; folders are made.
        model: as hetero.initialize() returned it.
        title: of the page; by default the model's class.
        tokens_per_step: how many tokens a step is trained on, by all ranks together; without it
            throughput is steps per second.

    Returns:
        A context manager with a method step(loss).

    Raises:
        ValueError: matplotlib is missing, or `path` is another kind of file.
        UnmanagedParameterError: hetero.initialize() has not returned this model.
        OSError: the folder cannot be made.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "hetero.report() draws with matplotlib, which is missing; install it: "
            "pip install 'hetero[train]'"
        )
    if tokens_per_step is not None and tokens_per_step < 1:
        raise ValueError(f"tokens_per_step must be at least 1, got {tokens_per_step}")
    file = Path(path)
    if file.suffix != ".html":
        if file.is_file():
            raise ValueError(
                f"hetero.report() writes an .html file or into a folder, and {file} is a file of "
                f"another kind; name another one"
            )
        file = file / FILE_NAME
    engine = engine_of(list(model.parameters()))
    file.parent.mkdir(parents=True, exist_ok=True)
    params = sum(m.numel for m in engine.params.in_order())
    return Report(
        file, engine, title or f"{type(model).__name__}, {params:,} parameters", tokens_per_step
    )
