"""Loss, speed, and bytes moved, step by step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hetero.reporting.page.palette import (
    LINK_COLOURS,
    LINK_WORDS,
    LOSS_COLOUR,
    PART_COLOURS,
    QUIET_COLOUR,
)
from hetero.reporting.page.svg import FONT_SIZE, HALF_WIDTH, new_figure, quiet_grid
from hetero.reporting.run_record import LINKS, PARTS, RunRecord, StepPoint
from offload.memory.sizes import format_bytes

_HEIGHT = 2.6
_MOST_DRAWN = 300
_MOST_BARS = 60
_REST = "rest"  # data, the scheduler, what the loop logs


def fewer(points: Sequence[StepPoint]) -> list[StepPoint]:
    """No more points than a chart can show."""
    found = list(points)
    while len(found) > _MOST_DRAWN:
        pairs = [a.plus(b) for a, b in zip(found[::2], found[1::2], strict=False)]
        found = pairs + ([found[-1]] if len(found) % 2 else [])
    return found


def draw_loss(record: RunRecord) -> Figure | None:
    """None if no loss was told."""
    points = [(p.last, p.loss) for p in fewer(record.points) if p.loss is not None]
    if not points:
        return None
    figure, axes = _half()
    steps, losses = [step for step, _ in points], [loss for _, loss in points]
    marker = "o" if len(points) < 60 else None
    axes.plot(steps, losses, color=LOSS_COLOUR, linewidth=1.8, marker=marker, markersize=3)
    axes.set_ylabel("loss")
    _step_axis(axes, record)
    return figure


def loss_finding(record: RunRecord) -> str:
    """From what to what it went."""
    losses = [point.loss for point in record.points if point.loss is not None]
    verb = "fell" if losses[-1] < losses[0] else "went"
    return f"Loss {verb} from {losses[0]:.4g} to {losses[-1]:.4g}"


def draw_throughput(record: RunRecord) -> Figure:
    """Tokens per second, or steps per second where no tokens were told."""
    figure, axes = _half()
    points = fewer(record.points)
    counted = record.tokens_per_s is not None
    rates = [(p.tokens or 0 if counted else p.steps) / max(p.seconds, 1e-9) for p in points]
    axes.plot([p.last for p in points], rates, color="#0072B2", linewidth=1.8)
    typical = statistics.median(rates)
    axes.axhline(typical, color=QUIET_COLOUR, linestyle=":", linewidth=1.3)
    axes.set_ylabel("tokens per second" if counted else "steps per second")
    axes.set_ylim(0, 1.15 * max(rates))
    _step_axis(axes, record)
    return figure


def throughput_finding(record: RunRecord) -> str:
    """The speed of the steady steps."""
    if record.tokens_per_s is not None:
        return f"{record.tokens_per_s:,.0f} tokens per second"
    return f"{1 / step_seconds(record):.3g} steps per second"


def step_seconds(record: RunRecord) -> float:
    """The median of the steady steps."""
    return max(1e-9, statistics.median(p.seconds / p.steps for p in record.steady))


def part_seconds(record: RunRecord) -> dict[str, float]:
    """Of a typical steady step: each of PARTS, and the rest."""
    parts = {
        name: statistics.median(p.parts_s[name] / p.steps for p in record.steady) for name in PARTS
    }
    parts[_REST] = max(0.0, step_seconds(record) - sum(parts.values()))
    return parts


def draw_step_time(record: RunRecord) -> Figure:
    """Seconds of each step, by what they were spent on."""
    figure, axes = _half()
    points = fewer(record.points)
    steps = [p.last for p in points]
    parts = [[p.parts_s[name] / p.steps for p in points] for name in PARTS]
    rest = [
        max(0.0, p.seconds / p.steps - sum(column))
        for p, column in zip(points, zip(*parts, strict=True), strict=True)
    ]
    colours = [*PART_COLOURS.values(), "#DDDDDD"]
    names = [*PARTS, _REST]
    totals = [p.seconds / p.steps for p in points]
    if len(points) > _MOST_BARS:
        axes.stackplot(steps, *parts, rest, colors=colours, labels=names, linewidth=0, step="mid")
    else:
        base = [0.0] * len(points)
        for name, seconds, colour in zip(names, [*parts, rest], colours, strict=True):
            axes.bar(steps, seconds, bottom=base, width=1.0, color=colour, label=name)
            base = [b + s for b, s in zip(base, seconds, strict=True)]
    # One slow step, like the first, must not flatten all others.
    axes.set_ylim(0, 1.1 * min(max(totals), 3 * statistics.median(totals)))
    axes.set_ylabel("seconds per step")
    _step_axis(axes, record)
    _legend(figure)
    return figure


def step_time_finding(record: RunRecord) -> str:
    """The part that takes longest."""
    parts = part_seconds(record)
    longest = max(parts, key=parts.__getitem__)
    share = parts[longest] / step_seconds(record)
    return f"A step takes {step_seconds(record):.3g} s, {share:.0%} of it {longest}"


def draw_traffic(record: RunRecord, links: Sequence[str]) -> Figure:
    """Bytes per step on each of `links` that moved any."""
    figure, axes = _half()
    points = fewer(record.points)
    steps = [p.last for p in points]
    for link in links:
        moved = [p.traffic_bytes[link] / p.steps / 1e9 for p in points]
        axes.plot(steps, moved, color=LINK_COLOURS[link], linewidth=1.8, label=LINK_WORDS[link])
    axes.set_ylim(0, None)
    axes.set_ylabel("GB per step")
    _step_axis(axes, record)
    _legend(figure)
    return figure


def used_links(record: RunRecord, among: Sequence[str] = LINKS) -> list[str]:
    """Those of `among` that moved anything."""
    return [link for link in among if any(p.traffic_bytes[link] for p in record.points)]


def traffic_finding(record: RunRecord, links: Sequence[str]) -> str:
    """Bytes of a steady step."""
    words = [f"{LINK_WORDS[link]} {format_bytes(record.per_step(link))}" for link in links]
    text = ", ".join(words)
    return f"{text[0].upper()}{text[1:]} per step"


def _half() -> tuple[Figure, Axes]:
    figure = new_figure(HALF_WIDTH, _HEIGHT)
    return figure, figure.add_subplot()


def _legend(figure: Figure) -> None:
    figure.legend(
        loc="outside upper left",
        ncols=2,
        frameon=False,
        fontsize=FONT_SIZE - 1,
        handlelength=1.2,
        columnspacing=1.2,
    )


def _step_axis(axes: Axes, record: RunRecord) -> None:
    first = record.points[0].last - record.points[0].steps + 1
    axes.set_xlabel("step")
    axes.set_xlim(first - 0.5, record.points[-1].last + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    quiet_grid(axes)
