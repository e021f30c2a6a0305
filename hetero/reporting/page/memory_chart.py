"""Memory per tier over time, stacked by kind, beside the budgets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hetero.reporting.page.labels import SQUARE, Label, label_right
from hetero.reporting.page.palette import INK, KIND_COLOURS, QUIET_COLOUR, TIER_WORDS
from hetero.reporting.page.svg import FONT_SIZE, FULL_WIDTH, new_figure, quiet_grid
from hetero.reporting.run_record import MemoryKind, RunRecord
from offload.memory.sizes import format_bytes
from offload.memory.tiers import Tier

_MOST_DRAWN = 300  # moments; of those between the one with most bytes
_FAR = 3  # a line so many times above all that is held would flatten it: its number is enough
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass(frozen=True)
class Moment:
    """Bytes of one tier at one moment, by kind; `beside` is held there by others than hetero."""

    at_s: float
    kinds: Mapping[MemoryKind, int]
    beside: int
    budget: int | None

    @property
    def held(self) -> int:
        """What hetero holds."""
        return sum(self.kinds.values())


def moments(record: RunRecord, tier: Tier) -> list[Moment]:
    """What the tier held, at no more moments than a chart can show."""
    found = []
    for point in record.points:
        for s in point.samples:
            beside = s.rss_bytes if tier is Tier.HOST else 0
            if tier is Tier.DEVICE:
                beside = s.beside_bytes
            kinds = s.by_kind(tier, point.on_disk if tier is Tier.DISK else {})
            budget = s.budget_bytes[tier]
            found.append(Moment(s.at_s - record.begin_s, kinds, beside, budget))
    size = -(-len(found) // _MOST_DRAWN)
    groups = (found[i : i + size] for i in range(0, len(found), max(1, size)))
    return [max(some, key=lambda m: (m.held, m.beside)) for some in groups]


def draw_memory(record: RunRecord) -> Figure:
    """A panel for each tier that held anything."""
    tiers = record.used_tiers
    figure = new_figure(FULL_WIDTH, 0.4 + 2.1 * len(tiers))
    panels = figure.subplots(len(tiers), 1, sharex=True, squeeze=False)[:, 0]
    for axes, tier in zip(panels, tiers, strict=True):
        _draw_tier(axes, record, tier)
    panels[-1].set_xlabel("seconds since the first step began")
    return figure


def _draw_tier(axes: Axes, record: RunRecord, tier: Tier) -> None:
    shown = moments(record, tier)
    times = [m.at_s for m in shown]
    if len(times) == 1:  # one moment has no width
        times, shown = [0.0, times[0]], shown * 2
    size, unit = _unit(max(m.held for m in shown), record, tier)
    kinds = [kind for kind in MemoryKind if any(kind in m.kinds for m in shown)]
    stacked = [[m.kinds.get(kind, 0) / size for m in shown] for kind in kinds]
    colours = [KIND_COLOURS[kind] for kind in kinds]
    axes.stackplot(times, stacked, colors=colours, linewidth=0)
    labels = _kind_labels(shown, kinds, size)
    top = max(m.held for m in shown) / size
    if tier is Tier.HOST:
        rss = [m.beside / size for m in shown]
        words = f"whole process: {format_bytes(max(m.beside for m in shown))}"
        if max(rss) <= _FAR * max(top, _limit(record, tier) / size, _plain(record, tier) / size):
            axes.plot(times, rss, color=QUIET_COLOUR, linewidth=1.3)
            labels.append((rss[-1], words, QUIET_COLOUR))
            top = max(top, *rss)
        if (limit := record.facts.process_bytes) is not None and limit / size <= _FAR * top:
            axes.axhline(limit / size, color=QUIET_COLOUR, linestyle="-.", linewidth=1.6)
            words = f"process_memory: {format_bytes(limit)}"
            labels.append((limit / size, words, QUIET_COLOUR))
    elif any(m.beside for m in shown):
        whole = [(m.held + m.beside) / size for m in shown]
        axes.plot(times, whole, color=QUIET_COLOUR, linewidth=1.3)
        words = f"with torch's own: {format_bytes(max(m.held + m.beside for m in shown))}"
        labels.append((whole[-1], words, QUIET_COLOUR))
        top = max(top, *whole)
    if (budget := record.budget_bytes[tier]) is not None and budget / size <= _FAR * top:
        # It moves with homes, where the whole process has a budget.
        heights = [math.nan if m.budget is None else m.budget / size for m in shown]
        axes.step(times, heights, where="post", color=INK, linestyle="--", linewidth=1.6)
        labels.append((budget / size, f"budget: {format_bytes(budget)}", INK))
    if plain := _plain(record, tier):
        axes.axhline(plain / size, color=INK, linestyle=":", linewidth=1.6)
        words = f"plain PyTorch's state:\n{format_bytes(plain)}"
        labels.append((plain / size, words, INK))
    axes.set_title(tier_finding(record, tier), loc="left", fontweight="bold")
    axes.set_ylabel(unit)
    axes.set_xlim(0, max(times))
    axes.set_ylim(0, 1.1 * max([top, *(height for height, _, _ in labels)]))
    quiet_grid(axes)
    label_right(axes, labels, FONT_SIZE - 1)


def memory_finding(record: RunRecord) -> str:
    """Whether budgets held."""
    limited = [tier for tier in record.used_tiers if record.largest_budget(tier) is not None]
    if not limited:
        return "Memory: no budget was given"
    if record.passed_budgets:
        return "Memory passed a budget"
    return f"Memory stayed within its budget{'s' if len(limited) > 1 else ''}"


def tier_finding(record: RunRecord, tier: Tier) -> str:
    """What there is to see of a tier, in one line."""
    peak, budget = record.peak_bytes[tier], record.largest_budget(tier)
    words = f"{TIER_WORDS[tier]}: at most {format_bytes(peak)}"
    if budget is None:
        return f"{words}, without a budget"
    return f"{words} {record.limit_words(tier)} ({peak / budget:.0%})"


def _plain(record: RunRecord, tier: Tier) -> int:
    return record.facts.plain_bytes if tier is record.facts.plain_tier else 0


def _limit(record: RunRecord, tier: Tier) -> int:
    return record.budget_bytes[tier] or 0


def _kind_labels(shown: Sequence[Moment], kinds: list[MemoryKind], size: int) -> list[Label]:
    """At the right end of each kind's part, with the most bytes that it ever had."""
    labels, base = [], 0.0
    for kind in kinds:
        height = shown[-1].kinds.get(kind, 0) / size
        most = max(m.kinds.get(kind, 0) for m in shown)
        words = f"{SQUARE} {kind.value}: {format_bytes(most)}"
        labels.append((base + height / 2, words, KIND_COLOURS[kind]))
        base += height
    return labels


def _unit(held: int, record: RunRecord, tier: Tier) -> tuple[int, str]:
    most = max(held, _plain(record, tier))
    return next((each for each in _UNITS if most >= each[0]), (1, "bytes"))
