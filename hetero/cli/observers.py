"""Shows a run while it happens, on stderr: on a terminal a bar, and memory beside its budgets, loss
and speed if asked for; elsewhere lines."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hetero.job.ranks import ALONE, Ranks
from hetero.job.run import Observer
from hetero.reporting.run_record import LINK_WORDS, TIER_WORDS, RunFacts, StepPoint
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
    lines = [
        f"model {setting.title}: {setting.params / 1e6:.1f}M parameters, whose training state"
        f" usually takes {format_bytes(setting.plain_bytes)}",
        f"policy {setting.policy}, host memory for it {budget}, in {setting.dtype}",
        *(f"{label} {value}" for label, value in setting.rows),
    ]
    if setting.ranks > 1:
        lines.append(f"{setting.ranks} ranks, which share the model's state; budgets are of each")
    lines += [f"note: {note}" for note in setting.notes]
    return lines


class LineObserver(Observer):
    """A line for the first, every `log_every`th and the last step."""

    def __init__(self, stream: TextIO, log_every: int) -> None:
        self._stream = stream
        self._log_every = log_every
        self._steps: int | None = None

    def begin(self, setting: RunFacts) -> None:
        self._steps = setting.planned_steps
        for line in opening_lines(setting):
            print(line, file=self._stream, flush=True)

    def step(self, point: StepPoint) -> None:
        if point.last in (1, self._steps) or point.last % self._log_every == 0:
            loss = f"step {point.last}/{self._steps}  loss {point.loss:.4f}"
            speed = f"{point.tokens_per_s:.0f} tokens/s"
            print(f"{loss}  {speed}  {_tiers(point)}", file=self._stream, flush=True)

    def end(self) -> None:
        self._stream.flush()


def _tiers(point: StepPoint) -> str:
    """Bytes held per tier and moved to and from the disk in the step."""
    now = point.samples[-1]
    held = [(tier.value, now.total(tier)) for tier in Tier]
    tiers = "  ".join(f"{tier} {format_bytes(n)}" for tier, n in held if n)
    read, written = (point.traffic_bytes[link] for link in ("disk_read", "disk_write"))
    if read or written:
        tiers += f"  read {format_bytes(read)} write {format_bytes(written)}"
    return tiers


_BAR_AND_TIME = 40  # columns for steps, a bar and the time that is left
_BARS = "▁▂▃▄▅▆▇█"
_SHOWN = 40  # newest steps, of the loss


class ScreenObserver(Observer):
    """A progress bar with the newest figures; they stay on the terminal at the end."""

    def __init__(self, console: Console, detailed: bool = False) -> None:
        """Nothing is drawn before begin(). `detailed`: memory beside its budgets, loss and speed
        have lines of their own below the bar."""
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
        self._peaks: Counter[str] = Counter()  # by label of a line
        self._losses: deque[float] = deque(maxlen=_SHOWN)

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
        figures = f"loss [bold]{point.loss:.3f}[/]  {point.tokens_per_s:.0f} tok/s"
        tiers = _tiers(point)
        # What finds no room would be cut.
        if len(tiers) + len(figures) <= self._console.width - _BAR_AND_TIME:
            figures += f"  {tiers}"
        self._progress.update(self._task, completed=point.last, figures=figures)
        shown = Group(self._progress, self._details(point)) if self._detailed else self._progress
        self._live.update(shown, refresh=True)

    def end(self) -> None:
        """The run is over, however that came."""
        self._live.stop()

    def _details(self, point: StepPoint) -> Panel:
        setting, now = self._setting, point.samples[-1]
        held = [(TIER_WORDS[tier], now.budget_bytes[tier], now.total(tier)) for tier in Tier]
        for sample in point.samples:
            self._peaks |= Counter({TIER_WORDS[tier]: sample.total(tier) for tier in Tier})
            self._peaks |= Counter({"process": sample.rss_bytes})
        self._losses.append(point.loss or 0.0)
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, budget, nbytes in (*held, ("process", setting.process_bytes, now.rss_bytes)):
            if peak := self._peaks[name]:
                limit = "no limit" if budget is None else f"of {format_bytes(budget)}"
                grid.add_row(name, f"{format_bytes(nbytes)} {limit}, at most {format_bytes(peak)}")
        grid.add_row("loss", f"{sparkline(self._losses)} {point.loss:.4f}")
        speed = f"{point.tokens_per_s:,.0f} tokens/s, {point.seconds:.3f} s per step"
        grid.add_row("speed", speed)
        moved = [
            f"{LINK_WORDS[link]} {format_bytes(nbytes)}"
            for link, nbytes in point.traffic_bytes.items()
            if nbytes
        ]
        grid.add_row("moved", ", ".join(moved) or "nothing")
        return Panel(grid, title=f"hetero train {setting.title}", title_align="left")


def sparkline(values: Sequence[float]) -> str:
    """A character for each value, the higher the larger it is among them."""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BARS[int((value - low) / span * (len(_BARS) - 1))] for value in values)
