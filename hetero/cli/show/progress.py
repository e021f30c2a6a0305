"""Showing a run while it happens, on stderr: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from hetero.cli.job.metrics import StepMetrics
from hetero.cli.job.result import Setting
from offload.memory.sizes import format_bytes


def opening_lines(setting: Setting) -> list[str]:
    """What a reader wants to know before the first step."""
    host = setting.budget_bytes["host"]
    budget = "no limit" if host is None else f"at most {format_bytes(host)}"
    lines = [
        f"model {setting.model}: {setting.params / 1e6:.1f}M parameters, whose training state"
        f" usually takes {format_bytes(setting.state_bytes)}",
        f"policy {setting.policy}, host memory for it {budget}, compute in {setting.dtype},"
        f" {setting.isa}, {setting.threads} threads",
        f"data {setting.data}",
    ]
    if setting.ranks > 1:
        lines.append(f"{setting.ranks} ranks, which share the model's state; budgets are of each")
    if setting.engine is not None:
        lines.append(f"state file in {setting.nvme_path} by {setting.engine}")
    lines += [f"note: {note}" for note in setting.notes]
    return lines


class SilentObserver:
    """Shows nothing."""

    def begin(self, setting: Setting) -> None: ...
    def step(self, metrics: StepMetrics) -> None: ...
    def end(self) -> None: ...


class LineObserver:
    """A line for the first, every `log_every`th and the last step."""

    def __init__(self, stream: TextIO, log_every: int) -> None:
        self._stream = stream
        self._log_every = log_every
        self._steps = 0

    def begin(self, setting: Setting) -> None:
        self._steps = setting.steps
        for line in opening_lines(setting):
            print(line, file=self._stream, flush=True)

    def step(self, metrics: StepMetrics) -> None:
        if metrics.step in (1, self._steps) or metrics.step % self._log_every == 0:
            loss = f"step {metrics.step}/{self._steps}  loss {metrics.loss:.4f}"
            speed = f"{metrics.tokens_per_s:.0f} tokens/s"
            print(f"{loss}  {speed}  {_tiers(metrics)}", file=self._stream, flush=True)

    def end(self) -> None:
        self._stream.flush()


_BAR_AND_TIME = 40  # columns for steps, a bar and the time that is left


class BarObserver:
    """A progress bar with the newest figures."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self._console,
            expand=True,
        )
        self._task = self._progress.add_task("train", total=None, start=False, figures="")

    def begin(self, setting: Setting) -> None:
        for line in opening_lines(setting):
            self._console.print(line, highlight=False, markup=False)
        self._progress.start()
        self._progress.update(self._task, total=setting.steps, figures="first step")
        self._progress.start_task(self._task)

    def step(self, metrics: StepMetrics) -> None:
        figures = f"loss [bold]{metrics.loss:.3f}[/]  {metrics.tokens_per_s:.0f} tok/s"
        tiers = _tiers(metrics)
        # What finds no room would be cut.
        if len(tiers) + len(figures) <= self._console.width - _BAR_AND_TIME:
            figures += f"  {tiers}"
        self._progress.update(self._task, completed=metrics.step, figures=figures)

    def end(self) -> None:
        self._progress.stop()


def _tiers(metrics: StepMetrics) -> str:
    """Bytes held per tier and moved to and from the disk in the step."""
    held = metrics.memory[-1].managed_bytes
    tiers = "  ".join(f"{tier} {format_bytes(n)}" for tier, n in held.items() if n)
    read, written = (metrics.traffic_bytes[link] for link in ("disk_read", "disk_write"))
    if read or written:
        tiers += f"  read {format_bytes(read)} write {format_bytes(written)}"
    return tiers
