"""Shows a run while it happens, on stderr: on a terminal a bar, and if asked for the figures of the
newest step below it; elsewhere lines."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hetero.job.ranks import ALONE, Ranks
from hetero.job.run import Observer
from hetero.reporting.run_record import LINK_WORDS, TIER_WORDS, RunFacts, StepPoint, fact_rows
from offload.memory.sizes import format_bytes
from offload.memory.tiers import Tier


def make_observer(log_every: int, ranks: Ranks = ALONE, live: bool = False) -> Observer:
    """The observer that fits where stderr goes; of several ranks the first shows the run.

    `live`: on a terminal that can redraw lines, memory, loss and speed below a bar.
    """
    if not ranks.leads:
        return Observer()
    if not sys.stderr.isatty():
        return LineObserver(sys.stderr, log_every)
    console = Console(stderr=True)
    return ScreenObserver(console, live and not console.is_dumb_terminal)


def opening_lines(setting: RunFacts) -> list[str]:
    """What a reader wants to know before the first step."""
    host = setting.budget_bytes["host"]
    budget = "no limit" if host is None else f"at most {format_bytes(host)}"
    lines = [f"{label}: {value}" for label, value in fact_rows(setting)]
    return [*lines, f"model state in RAM: {budget}", *(f"note: {note}" for note in setting.notes)]


def step_rows(setting: RunFacts, point: StepPoint) -> list[tuple[str, str]]:
    """What was done in a step, and is held at its end beside its limits: labels and values."""
    now = point.samples[-1]
    moved = [
        f"{LINK_WORDS[link]} {format_bytes(n)}" for link, n in point.traffic_bytes.items() if n
    ]
    held = [(TIER_WORDS[tier], now.total(tier), now.budget_bytes[tier]) for tier in Tier]
    held.append(("process", now.rss_bytes, setting.process_bytes))
    speed = f"{point.tokens_per_s:,.0f} tokens/s, {point.seconds:.3g} s per step"
    return [
        ("loss", f"{point.loss:.4f}"),
        ("speed", speed),
        *(
            (name, format_bytes(n) + ("" if limit is None else f" of {format_bytes(limit)}"))
            for name, n, limit in held
            if n
        ),
        ("moved", ", ".join(moved) or "nothing"),
    ]


class LineObserver(Observer):
    """A line for the first, every `log_every`th and the last step."""

    def __init__(self, stream: TextIO, log_every: int) -> None:
        self._stream = stream
        self._log_every = log_every

    def begin(self, setting: RunFacts) -> None:
        self._setting = setting
        for line in opening_lines(setting):
            print(line, file=self._stream, flush=True)

    def step(self, point: StepPoint) -> None:
        steps = self._setting.planned_steps
        if point.last in (1, steps) or point.last % self._log_every == 0:
            words = "  ".join(
                f"{label} {value}" for label, value in step_rows(self._setting, point)
            )
            print(f"step {point.last}/{steps}  {words}", file=self._stream, flush=True)


_BAR_AND_TIME = 40  # columns for steps, a bar and the time that is left


class ScreenObserver(Observer):
    """A progress bar with the newest figures; they stay on the terminal at the end."""

    def __init__(self, console: Console, detailed: bool = False) -> None:
        """Nothing is drawn before begin(). `detailed`: the figures have lines of their own below
        the bar."""
        self._console = console
        self._detailed = detailed
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            expand=True,
        )
        self._live = Live(self._progress, console=console)

    def begin(self, setting: RunFacts) -> None:
        """Says what is trained."""
        for line in opening_lines(setting):
            self._console.print(line, highlight=False, markup=False)
        self._setting = setting
        self._task = self._progress.add_task(
            "train", total=setting.planned_steps, figures="first step"
        )
        self._live.start()

    def step(self, point: StepPoint) -> None:
        """A step was made."""
        rows, room = step_rows(self._setting, point), self._console.width - _BAR_AND_TIME
        figures = f"loss {point.loss:.3f}  {point.tokens_per_s:.0f} tok/s"
        below = Table.grid(padding=(0, 2))
        for label, value in rows if self._detailed else ():
            below.add_row(label, value)
        for label, value in () if self._detailed else rows[2:]:
            more = f"{figures}  {label} {value}"
            if len(more) > room:  # it would be cut
                break
            figures = more
        self._progress.update(self._task, completed=point.last, figures=figures)
        self._live.update(Group(self._progress, below), refresh=True)

    def end(self) -> None:
        """The run is over, however that came."""
        self._live.stop()
