"""Memory per tier, step by step, stacked by kind, and its limits."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hetero.reporting.drawing import FULL_WIDTH, HALF_WIDTH, byte_unit, key, new_figure, step_axis
from hetero.reporting.palette import INK, KIND_COLOURS, QUIET, TIER_PLACES
from hetero.reporting.run_record import MemoryKind, RunRecord
from offload.memory.sizes import format_bytes
from offload.memory.tiers import Tier

_MOST_DRAWN, _MOST_NARROW = 300, 120  # moments; of those between the one with most bytes
_FAR = 3  # a line so many times above all that is held would flatten it: its number is enough


@dataclass(frozen=True)
class Moment:
    """Bytes of one tier at one moment, by kind; `beside` is held there by others than hetero.

    `at` is in steps: the axis of all charts, on which step n reaches from n - 0.5 to n + 0.5.
    """

    at: float
    kinds: Mapping[MemoryKind, int]
    beside: int
    budget: int | None

    @property
    def held(self) -> int:
        """What hetero holds."""
        return sum(self.kinds.values())


def moments(record: RunRecord, tier: Tier, most: int = _MOST_DRAWN) -> list[Moment]:
    """What the tier held, at no more moments than a chart can show."""
    ends_s = list(accumulate((p.seconds for p in record.points), initial=record.begin_s))
    found = []
    for point in record.points:
        for s in point.samples:
            beside = s.rss_bytes if tier is Tier.HOST else 0
            if tier is Tier.DEVICE:
                beside = s.beside_bytes
            kinds = s.by_kind(tier, point.on_disk if tier is Tier.DISK else {})
            # (What is sampled when a step ends may be a moment late.)
            number = min(bisect_right(ends_s, s.at_s), len(record.points)) - 1
            within = record.points[number]
            share = min(1.0, (s.at_s - ends_s[number]) / max(within.seconds, 1e-9))
            at = within.last + 0.5 - within.steps * (1 - share)
            found.append(Moment(at, kinds, beside, s.budget_bytes[tier]))
    size = -(-len(found) // most)
    groups = (found[i : i + size] for i in range(0, len(found), max(1, size)))
    return [max(some, key=lambda m: (m.held, m.beside)) for some in groups]


def draw_memory(record: RunRecord, narrow: bool = False) -> Figure:
    """A panel for each tier that held anything; keys of a `narrow` one are below."""
    tiers = record.used_tiers
    if narrow:
        figure = new_figure(HALF_WIDTH, 4.4 * len(tiers))
        parts = figure.subfigures(len(tiers), 1, squeeze=False)[:, 0]
        panels = [part.add_subplot() for part in parts]
    else:
        figure = new_figure(FULL_WIDTH, 0.4 + 2.1 * len(tiers))
        panels = list(figure.subplots(len(tiers), 1, sharex=True, squeeze=False)[:, 0])
    for axes, tier in zip(panels, tiers, strict=True):
        draw_tier(axes, record, tier, narrow)
        if narrow or axes is panels[-1]:
            step_axis(axes, *record.first_and_last)
    return figure


def draw_tier(axes: Axes, record: RunRecord, tier: Tier, narrow: bool = False) -> None:
    """What the tier held, and its limits; the caller gives the axis of steps."""
    shown = moments(record, tier, _MOST_NARROW if narrow else _MOST_DRAWN)
    if len(shown) == 1:  # one moment has no width
        shown = [Moment(0.0, shown[0].kinds, shown[0].beside, shown[0].budget), *shown]
    at = [m.at for m in shown]
    plain = record.facts.plain_bytes if tier is record.facts.plain_tier else 0
    size, unit = byte_unit(max(plain, *(m.held for m in shown)))
    entries: list[tuple[float, Artist]] = []

    def line(
        heights: list[float] | float, words: str, colour: str, style: str, at_end: float
    ) -> None:
        """A line over all steps, or one height, which is named."""
        if isinstance(heights, float):
            made = axes.axhline(heights, color=colour, linestyle=style, linewidth=1.5)
        else:
            made = axes.plot(at, heights, color=colour, linestyle=style, linewidth=1.5)[0]
        made.set_label(words)
        entries.append((at_end, made))

    kinds = [kind for kind in MemoryKind if any(kind in m.kinds for m in shown)]
    stacked = [[m.kinds.get(kind, 0) / size for m in shown] for kind in kinds]
    axes.stackplot(at, stacked, colors=[KIND_COLOURS[kind] for kind in kinds], linewidth=0)
    base = 0.0
    for kind, heights in zip(kinds, stacked, strict=True):
        most = max(m.kinds.get(kind, 0) for m in shown)
        words = f"{kind.value}: {format_bytes(most)}"
        entries.append((base + heights[-1] / 2, Patch(color=KIND_COLOURS[kind], label=words)))
        base += heights[-1]
    top = max(m.held for m in shown) / size
    budget, limit = record.budget_bytes[tier], record.facts.process_bytes
    if tier is Tier.HOST:
        rss, peak = [m.beside / size for m in shown], record.peak_rss_bytes
        if max(rss) <= _FAR * max(top, (budget or 0) / size, plain / size):
            line(rss, f"whole process (RSS): at most {format_bytes(peak)}", QUIET, "-", rss[-1])
            top = max(top, *rss, peak / size)
        if limit is not None and limit / size <= _FAR * top:
            line(limit / size, f"process_memory: {format_bytes(limit)}", QUIET, "-.", limit / size)
            top = max(top, limit / size)
    elif any(m.beside for m in shown):
        whole = [(m.held + m.beside) / size for m in shown]
        most = max(m.held + m.beside for m in shown)
        line(whole, f"with torch's own: at most {format_bytes(most)}", QUIET, "-", whole[-1])
        top = max(top, *whole)
    if budget is not None and budget / size <= _FAR * top:
        # It moves with homes, where the whole process has a budget.
        heights = [math.nan if m.budget is None else m.budget / size for m in shown]
        line(heights, f"budget: {format_bytes(budget)}", INK, "--", budget / size)
        axes.lines[-1].set_drawstyle("steps-post")
        top = max([top, *(height for height in heights if not math.isnan(height))])
    if plain:
        words = f"plain PyTorch's model state: {format_bytes(plain)}"
        line(plain / size, words, INK, ":", plain / size)
        top = max(top, plain / size)
    axes.set_title(tier_finding(record, tier, "\n" if narrow else " "))
    axes.set_ylabel(f"held ({unit})")
    axes.set_ylim(0, 1.08 * top)
    axes.grid(axis="y")
    key(axes, entries, narrow)


def memory_finding(record: RunRecord) -> str:
    """The verdict on budgets."""
    limited = [tier for tier in record.used_tiers if record.largest_budget(tier) is not None]
    if not limited:
        return "Memory: no budget was given"
    if record.passed_budgets:
        return "Memory passed a budget"
    return f"Memory stayed within its budget{'s' if len(limited) > 1 else ''}"


def tier_finding(record: RunRecord, tier: Tier, gap: str = " ") -> str:
    """What there is to see of a tier, in one line, or two with a `gap` that is a line's end."""
    peak, budget = record.peak_bytes[tier], record.largest_budget(tier)
    words = f"Model state {TIER_PLACES[tier]}: at most {format_bytes(peak)}"
    if budget is None:
        return f"{words},{gap}without a budget"
    return f"{words}{gap}{record.limit_words(tier)} ({peak / budget:.0%})"
