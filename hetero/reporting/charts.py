"""The charts of a run, drawn by matplotlib: panels over one axis of steps."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from hetero.reporting.drawing import byte_unit, new_figure, save, styled
from hetero.reporting.palette import (
    INK,
    KIND_COLOURS,
    LINK_LINES,
    PHASE_COLOURS,
    QUIET,
    REST_COLOUR,
)
from hetero.reporting.run_record import (
    LINK_WORDS,
    PARTS,
    REST,
    TIER_PLACES,
    MemoryKind,
    RunRecord,
    StepPoint,
    thinned,
)
from offload.memory.sizes import format_bytes
from offload.memory.tiers import Tier

_WIDTH, _HEIGHT = 9.0, 2.0  # inches of the figure, and of a panel
_MOST_DRAWN = 300  # points, or moments
_MOST_BARS = 60
_TITLE_WIDTH = 100  # characters of a line that fits the figure
_LINKS = (("disk_read", "disk_write", "h2d", "d2h"), ("sent", "received"))
_FAR = 3  # a line so many times above all that is held would flatten it: its number is enough


def draw_picture(record: RunRecord, path: Path) -> None:
    """Writes loss, memory by tier and the time of a step as one picture, in the format of the
    path's suffix. The record has at least one step. Raises OSError."""
    facts = record.facts
    with styled():
        figure = draw_run(record, whole=False)
        figure.suptitle(
            f"{facts.title}: {facts.params / 1e6:.0f}M parameters, policy {facts.policy},"
            f" {facts.dtype}, {record.tokens_per_s or 0:.0f} tokens/s",
            fontsize=12,
            fontweight="bold",
        )
        save(figure, path)


def draw_run(record: RunRecord, whole: bool = True) -> Figure:
    """Loss, memory of each tier with its limits, and the time of a step, over the steps; `whole`:
    bytes moved, too. The record has at least one step."""
    points = thinned(record.points, _MOST_DRAWN)
    panels: list[tuple[str, Callable[[Axes], Sequence[Artist]]]] = []
    if record.loss_words:
        panels.append((f"Loss: {record.loss_words}", partial(_draw_loss, record, points)))
    for tier in record.used_tiers:
        panels.append((_tier_finding(record, tier), partial(_draw_tier, record, tier)))
    longest = max(record.part_s, key=record.part_s.__getitem__)
    share = f"{record.part_s[longest] / record.step_s:.0%} of it {longest}"
    words = f"A step takes {record.step_s:.3g} s, {share}"
    panels.append((words, partial(_draw_step_time, record, points)))
    if whole:
        for among in _LINKS:
            if links := record.used_links(among):
                moved = [f"{LINK_WORDS[n]} {format_bytes(record.mean(n))}" for n in links]
                text = f"{', '.join(moved)} per step"
                words = f"{text[0].upper()}{text[1:]}"
                panels.append((words, partial(_draw_traffic, points, links)))
    figure = new_figure(_WIDTH, 0.4 + _HEIGHT * len(panels))
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (finding, draw) in zip(rows, panels, strict=True):
        handles = draw(axes)  # as the key names them, from the top
        if handles:
            axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.015, 1.0))
        axes.set_title(textwrap.fill(finding, _TITLE_WIDTH))
        axes.grid(axis="y")
    # Step n reaches from n - 0.5 to n + 0.5.
    axes.set_xlim(record.points[0].last - 0.5, record.points[-1].last + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
    axes.set_xlabel("step")
    return figure


def _draw_loss(record: RunRecord, points: Sequence[StepPoint], axes: Axes) -> Sequence[Artist]:
    """The losses that were told; dotted: of guessing."""
    told = [(p.last, p.loss) for p in points if p.loss is not None]
    steps, losses = [step for step, _ in told], [loss for _, loss in told]
    marker = "o" if len(told) < _MOST_BARS else None
    axes.plot(steps, losses, color=INK, linewidth=1.6, marker=marker, markersize=3)
    chance = record.facts.chance_loss
    axes.set_ylabel("loss" if chance is None else "loss (nats per token)")
    if chance is None or chance > 2 * max(losses):
        return []
    label = f"guessing: {chance:.4g}"
    return [axes.axhline(chance, color=QUIET, linestyle=":", linewidth=1.5, label=label)]


def _draw_step_time(record: RunRecord, points: Sequence[StepPoint], axes: Axes) -> Sequence[Artist]:
    """Seconds of each step by phase; the key has their medians."""
    steps, totals = [p.last for p in points], [p.seconds for p in points]
    parts = [[p.parts_s[name] for p in points] for name in PARTS]
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
        for name, s in reversed(record.part_s.items())
    ]


def _draw_traffic(
    points: Sequence[StepPoint], links: Sequence[str], axes: Axes
) -> Sequence[Artist]:
    """Bytes of a step on each of `links`."""
    most = max(point.traffic_bytes[link] for point in points for link in links)
    size, unit = byte_unit(most)
    for link in links:
        colour, style = LINK_LINES[link]
        heights = [p.traffic_bytes[link] / size for p in points]
        steps = [p.last for p in points]
        axes.plot(steps, heights, color=colour, linestyle=style, label=LINK_WORDS[link])
    axes.set_ylim(0, None)
    axes.set_ylabel(f"moved per step ({unit})")
    return axes.lines


# Memory, stacked by kind, and its limits


class Moment(NamedTuple):
    """Bytes of one tier at one moment, by kind; `beside` is held there by others than hetero.

    `at` is on the axis of steps.
    """

    at: float
    kinds: Mapping[MemoryKind, int]
    beside: int
    budget: int | None

    @property
    def held(self) -> int:
        """The bytes that hetero holds."""
        return sum(self.kinds.values())


def moments(record: RunRecord, tier: Tier) -> list[Moment]:
    """No more than a panel can show; of several those at which most was held.

    What was held after forward, backward and step() is drawn as far from one another.
    """
    found = []
    for point in record.points:
        for number, s in enumerate(point.samples, start=1):
            beside = {Tier.HOST: s.rss_bytes, Tier.DEVICE: s.beside_bytes}.get(tier, 0)
            kinds = s.by_kind(tier, point.on_disk if tier is Tier.DISK else {})
            at = point.last - 0.5 + number / len(point.samples)
            found.append(Moment(at, kinds, beside, s.budget_bytes[tier]))
    size = -(-len(found) // _MOST_DRAWN)
    groups = (found[i : i + size] for i in range(0, len(found), max(1, size)))
    return [max(some, key=lambda m: (m.held, m.beside)) for some in groups]


def _draw_tier(record: RunRecord, tier: Tier, axes: Axes) -> Sequence[Artist]:
    """What the tier held, and its limits."""
    shown = moments(record, tier)
    shown = [shown[0]._replace(at=record.points[0].last - 0.5), *shown]
    at = [m.at for m in shown]
    plain = record.facts.plain_bytes if tier is record.facts.plain_tier else 0
    top = max(plain, *(m.held for m in shown))
    size, unit = byte_unit(top)
    entries: list[tuple[float, Artist]] = []  # of the key, with their heights at the end

    kinds = [kind for kind in MemoryKind if any(kind in m.kinds for m in shown)]
    stacked = [[m.kinds.get(kind, 0) / size for m in shown] for kind in kinds]
    axes.stackplot(at, stacked, colors=[KIND_COLOURS[kind] for kind in kinds], linewidth=0)
    base = 0.0
    for kind, heights in zip(kinds, stacked, strict=True):
        words = f"{kind.value}: {format_bytes(max(m.kinds.get(kind, 0) for m in shown))}"
        entries.append((base + heights[-1] / 2, Patch(color=KIND_COLOURS[kind], label=words)))
        base += heights[-1]

    lines: list[tuple[list[float], str, str, str]] = []  # of bytes, with words, colour and style

    def level(nbytes: int, words: str, colour: str, style: str) -> None:
        lines.append(([nbytes] * len(at), f"{words}: {format_bytes(nbytes)}", colour, style))

    if plain:
        level(plain, "plain PyTorch's model state", INK, ":")
    if (budget := record.budget_bytes[tier]) is not None:
        # It moves with homes, where the whole process has a budget.
        moved = [math.nan if m.budget is None else m.budget for m in shown[:-1]]
        lines.append(([*moved, budget], f"budget: {format_bytes(budget)}", INK, "--"))
    if tier is Tier.HOST:
        words = f"whole process (RSS): at most {format_bytes(record.peak_rss_bytes)}"
        lines.append(([m.beside for m in shown], words, QUIET, "-"))
        if record.facts.process_bytes is not None:
            level(record.facts.process_bytes, "process_memory", QUIET, "-.")
    elif any(m.beside for m in shown):
        whole: list[float] = [m.held + m.beside for m in shown]
        lines.append((whole, f"with torch's own: at most {format_bytes(max(whole))}", QUIET, "-"))
    for nbytes, words, colour, style in lines:
        most = max(n for n in nbytes if not math.isnan(n))
        if most <= _FAR * top:
            top = max(top, int(most))
            made = axes.plot(at, [n / size for n in nbytes], color=colour, linestyle=style)[0]
            made.set(
                label=words, linewidth=1.5, drawstyle=("steps-post" if style == "--" else "default")
            )
            entries.append((nbytes[-1] / size, made))
    axes.set_ylabel(f"held ({unit})")
    axes.set_ylim(0, 1.08 * top / size)
    return [handle for _, handle in sorted(entries, key=lambda e: e[0], reverse=True)]


def _tier_finding(record: RunRecord, tier: Tier) -> str:
    """What there is to see of a tier, in one line."""
    peak, budget = record.peak_bytes[tier], record.largest_budget(tier)
    words = f"Model state {TIER_PLACES[tier]}: {record.peak_words(tier)}"
    if budget is None:
        return f"{words}, without a budget"
    return f"{words} {record.limit_words(tier)} ({peak / budget:.0%})"
