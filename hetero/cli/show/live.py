"""Showing a run while it happens, on a terminal: memory beside its budgets, loss and speed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hetero.cli.job.metrics import TIERS, StepMetrics
from hetero.cli.job.result import Setting
from hetero.cli.show.progress import opening_lines
from hetero.reporting.palette import TIER_WORDS
from offload.memory.sizes import format_bytes
from offload.memory.tiers import Tier

_BARS = "▁▂▃▄▅▆▇█"
_BAR_WIDTHS = 10, 40  # columns, by those of the terminal
_WORDS_WIDTH = 60  # of all but the bars


class LiveObserver:
    """Redraws a few lines after each step; they stay on the terminal at the end."""

    def __init__(self, console: Console) -> None:
        """Nothing is drawn before begin()."""
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._setting: Setting | None = None
        self._peak = dict.fromkeys(TIERS, 0)
        self._peak_rss = 0
        least, most = _BAR_WIDTHS
        self._width = min(most, max(least, console.width - _WORDS_WIDTH))
        self._losses: deque[float] = deque(maxlen=self._width)
        self._speeds: deque[float] = deque(maxlen=self._width)

    def begin(self, setting: Setting) -> None:
        """Says what is trained."""
        for line in opening_lines(setting):
            self._console.print(line, highlight=False, markup=False)
        self._setting = setting
        self._live.start()

    def step(self, metrics: StepMetrics) -> None:
        """A step was made."""
        assert self._setting is not None
        for tier in TIERS:
            held = max((m.managed_bytes[tier] for m in metrics.memory), default=0)
            self._peak[tier] = max(self._peak[tier], held)
        self._peak_rss = max(self._peak_rss, *(m.rss_bytes for m in metrics.memory))
        self._losses.append(metrics.loss)
        self._speeds.append(metrics.tokens_per_s)
        self._live.update(self._draw(self._setting, metrics), refresh=True)

    def end(self) -> None:
        """The run is over, however that came."""
        self._live.stop()

    def _draw(self, setting: Setting, metrics: StepMetrics) -> Panel:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        steps = ProgressBar(total=setting.steps, completed=metrics.step, width=self._width)
        grid.add_row("step", steps, f"{metrics.step} of {setting.steps}")
        now = metrics.memory[-1]
        held = [
            (TIER_WORDS[Tier(tier)], now.managed_bytes[tier], now.budget_bytes[tier], peak)
            for tier, peak in self._peak.items()
            if peak
        ]
        held.append(("process", now.rss_bytes, setting.process_bytes, self._peak_rss))
        for name, nbytes, budget, peak in held:
            limit = "no limit" if budget is None else f"of {format_bytes(budget)}"
            bar = ProgressBar(
                total=budget or peak,
                completed=nbytes,
                width=self._width,
                complete_style="default",
                finished_style="default",
            )
            grid.add_row(name, bar, f"{format_bytes(nbytes)} {limit}, at most {format_bytes(peak)}")
        grid.add_row("loss", Text(sparkline(self._losses)), f"{metrics.loss:.4f}")
        speed = f"{metrics.tokens_per_s:,.0f} tokens/s, {metrics.step_s:.3f} s per step"
        grid.add_row("speed", Text(sparkline(self._speeds)), speed)
        moved = [
            f"{words} {format_bytes(metrics.traffic_bytes[link])}"
            for link, words in (
                ("disk_read", "NVMe read"),
                ("disk_write", "written"),
                ("h2d", "to the device"),
                ("d2h", "back"),
                ("sent", "sent"),
            )
            if metrics.traffic_bytes[link]
        ]
        last = Text(f"moved in the step: {', '.join(moved) or 'nothing'}", style="dim")
        return Panel(Group(grid, last), title=f"hetero train {setting.model}", title_align="left")


def sparkline(values: Sequence[float]) -> str:
    """A character for each value, the higher the larger it is among them."""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BARS[int((value - low) / span * (len(_BARS) - 1))] for value in values)
