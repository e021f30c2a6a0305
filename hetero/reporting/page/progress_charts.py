"""Loss, speed, and bytes moved, step by step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hetero.reporting.drawing import HALF_WIDTH, byte_unit, new_figure, step_axis
from hetero.reporting.palette import (
    INK,
    LINK_LINES,
    LINK_WORDS,
    PHASE_COLOURS,
    QUIET,
    REST_COLOUR,
)
from hetero.reporting.run_record import PARTS, REST, RunRecord, StepPoint
from offload.memory.sizes import format_bytes

_HEIGHT = 2.6
_MOST_DRAWN = 300
_MOST_BARS = 60


def fewer(points: Sequence[StepPoint]) -> list[StepPoint]:
    """No more points than a chart can show."""
    found = list(points)
    while len(found) > _MOST_DRAWN:
        pairs = [a.plus(b) for a, b in zip(found[::2], found[1::2], strict=False)]
        found = pairs + ([found[-1]] if len(found) % 2 else [])
    return found


def half_figure(record: RunRecord) -> tuple[Figure, Axes]:
    """A small figure with an axis of steps."""
    figure = new_figure(HALF_WIDTH, _HEIGHT)
    axes = figure.add_subplot()
    step_axis(axes, *record.first_and_last)
    return figure, axes


def draw_loss(axes: Axes, record: RunRecord, unit: str = "") -> None:
    """The losses that were told; dotted: of guessing."""
    points = [(p.last, p.loss) for p in fewer(record.points) if p.loss is not None]
    steps, losses = [step for step, _ in points], [loss for _, loss in points]
    marker = "o" if len(points) < _MOST_BARS else None
    axes.plot(steps, losses, color=INK, linewidth=1.6, marker=marker, markersize=3)
    chance = record.facts.chance_loss
    if chance is not None and chance <= 2 * max(losses):
        line = axes.axhline(chance, color=QUIET, linestyle=":", linewidth=1.5)
        line.set_label(f"guessing: {chance:.4g}")
    axes.set_ylabel(f"loss{unit}")


def draw_throughput(axes: Axes, record: RunRecord) -> None:
    """Tokens per second, or steps per second where no tokens were told."""
    points = fewer(record.points)
    counted = record.tokens_per_s is not None
    rates = [(p.tokens or 0 if counted else p.steps) / max(p.seconds, 1e-9) for p in points]
    axes.plot([p.last for p in points], rates, color=INK, linewidth=1.6)
    axes.axhline(statistics.median(rates), color=QUIET, linestyle=":", linewidth=1.3)
    axes.set_ylabel(f"speed ({'tokens' if counted else 'steps'} per s)")
    axes.set_ylim(0, 1.15 * max(rates))


def throughput_finding(record: RunRecord) -> str:
    """The speed of the steady steps."""
    if record.tokens_per_s is not None:
        return f"{record.tokens_per_s:,.0f} tokens per second"
    return f"{1 / record.step_s:.3g} steps per second"


def draw_step_time(axes: Axes, record: RunRecord) -> list[Patch]:
    """Seconds of each step by phase; returns what names them, with their medians, from below."""
    points = fewer(record.points)
    steps = [p.last for p in points]
    parts = [[p.parts_s[name] / p.steps for p in points] for name in PARTS]
    totals = [p.seconds / p.steps for p in points]
    rest = [max(0.0, t - sum(s)) for t, s in zip(totals, zip(*parts, strict=True), strict=True)]
    colours = {**PHASE_COLOURS, REST: REST_COLOUR}
    if len(points) > _MOST_BARS:
        axes.stackplot(steps, *parts, rest, colors=colours.values(), linewidth=0, step="mid")
    else:
        base = [0.0] * len(points)
        for seconds, colour in zip([*parts, rest], colours.values(), strict=True):
            axes.bar(steps, seconds, bottom=base, width=1.0, color=colour)
            base = [b + s for b, s in zip(base, seconds, strict=True)]
    # One slow step, like the first, must not flatten all others.
    axes.set_ylim(0, 1.1 * min(max(totals), 3 * statistics.median(totals)))
    axes.set_ylabel("step time (s)")
    return [
        Patch(color=colours[name], label=f"{name}: {s:.3g} s, {s / record.step_s:.0%}")
        for name, s in record.part_s.items()
    ]


def step_time_finding(record: RunRecord) -> str:
    """The part that takes longest."""
    parts = record.part_s
    longest = max(parts, key=parts.__getitem__)
    share = parts[longest] / record.step_s
    return f"A step takes {record.step_s:.3g} s, {share:.0%} of it {longest}"


def draw_traffic(axes: Axes, record: RunRecord, links: Sequence[str]) -> None:
    """Bytes per step on each of `links` that moved any."""
    points = fewer(record.points)
    steps = [p.last for p in points]
    moved = {link: [p.traffic_bytes[link] / p.steps for p in points] for link in links}
    size, unit = byte_unit(int(max(max(each) for each in moved.values())))
    for link, each in moved.items():
        colour, style = LINK_LINES[link]
        heights = [nbytes / size for nbytes in each]
        axes.plot(steps, heights, color=colour, linestyle=style, label=LINK_WORDS[link])
    axes.set_ylim(0, None)
    axes.set_ylabel(f"moved per step ({unit})")


def traffic_finding(record: RunRecord, links: Sequence[str]) -> str:
    """Bytes of a steady step."""
    words = [f"{LINK_WORDS[link]} {format_bytes(record.mean(link))}" for link in links]
    text = ", ".join(words)
    return f"{text[0].upper()}{text[1:]} per step"
