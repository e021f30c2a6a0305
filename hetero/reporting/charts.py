"""The charts of a run, drawn by matplotlib for its picture and for its page."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from hetero.reporting.drawing import (
    FONT_SIZE,
    FULL_WIDTH,
    HALF_WIDTH,
    byte_unit,
    key,
    new_figure,
    save,
    step_axis,
    styled,
)
from hetero.reporting.palette import (
    FAINT,
    GROUND,
    INK,
    KIND_COLOURS,
    LINK_LINES,
    LINK_WORDS,
    PHASE_COLOURS,
    QUIET,
    REST_COLOUR,
    TIER_COLOURS,
    TIER_PLACES,
    TIER_WORDS,
    ink_on,
)
from hetero.reporting.run_record import (
    PARTS,
    REST,
    ChunkHomes,
    MemoryKind,
    RunRecord,
    StepPoint,
    halved,
)
from offload.memory.sizes import format_bytes
from offload.memory.tiers import Tier


def draw_picture(record: RunRecord, path: Path) -> None:
    """Writes loss, memory by tier and the time of a step over the same steps as one picture, in the
    format of the path's suffix. The record has at least one step. Raises OSError."""
    charts, tiers, facts = step_charts(record), record.used_tiers, record.facts
    with styled():
        figure = new_figure(FULL_WIDTH, 4.6 + 2.2 * len(tiers))
        figure.suptitle(
            f"{facts.title}: {facts.params / 1e6:.0f}M parameters, policy {facts.policy},"
            f" {facts.dtype}, {record.tokens_per_s or 0:.0f} tokens/s",
            fontsize=12,
            fontweight="bold",
        )
        loss, *memory, time = figure.subplots(2 + len(tiers), 1, sharex=True)
        for axes, name in ((loss, "loss"), (time, "step-time")):
            key(axes, list(enumerate(charts[name].draw(axes))))
            axes.set_title(charts[name].finding)
        for axes, tier in zip(memory, tiers, strict=True):
            _draw_tier(axes, record, tier)
        for axes in (loss, *memory, time):
            axes.label_outer()
            axes.grid(axis="y")
        step_axis(time, *record.first_and_last)
        save(figure, path)


# Progress, step by step

_MOST_DRAWN = 300  # points, or moments
_MOST_BARS = 60
_LINKS = {"moved": ("disk_read", "disk_write", "h2d", "d2h"), "ranks": ("sent", "received")}


@dataclass(frozen=True)
class StepChart:
    """A chart over the axis of steps.

    Attributes:
        finding: the words above it, which say what there is to see.
        draw: draws all but the axis of steps; returns what a key names, from the bottom up.
    """

    finding: str
    draw: Callable[[Axes], Sequence[Artist]]


def step_charts(record: RunRecord) -> dict[str, StepChart]:
    """The charts of progress by name, as far as the record has figures for them."""
    points, found = fewer(record.points), {}
    if record.loss_words:
        draw_loss = partial(_draw_loss, record, points)
        found["loss"] = StepChart(f"Loss: {record.loss_words}", draw_loss)
    rate, unit = record.speed
    found["speed"] = StepChart(f"{rate} {unit} per second", partial(_draw_speed, points, unit))
    parts = record.part_s
    longest = max(parts, key=parts.__getitem__)
    share = f"{parts[longest] / record.step_s:.0%} of it {longest}"
    draw_time = partial(_draw_step_time, record, points)
    found["step-time"] = StepChart(f"A step takes {record.step_s:.3g} s, {share}", draw_time)
    for name, among in _LINKS.items():
        if links := record.used_links(among):
            words = [f"{LINK_WORDS[link]} {format_bytes(record.mean(link))}" for link in links]
            text = ", ".join(words)
            finding = f"{text[0].upper()}{text[1:]} per step"
            found[name] = StepChart(finding, partial(_draw_traffic, points, links))
    return found


def fewer(points: Sequence[StepPoint]) -> list[StepPoint]:
    """No more points than a chart can show."""
    found = list(points)
    while len(found) > _MOST_DRAWN:
        found = halved(found)
    return found


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


def _draw_speed(points: Sequence[StepPoint], unit: str, axes: Axes) -> Sequence[Artist]:
    counts = [p.steps if unit == "steps" else p.tokens or 0 for p in points]
    rates = [count / max(p.seconds, 1e-9) for count, p in zip(counts, points, strict=True)]
    axes.plot([p.last for p in points], rates, color=INK, linewidth=1.6)
    axes.axhline(statistics.median(rates), color=QUIET, linestyle=":", linewidth=1.3)
    axes.set_ylabel(f"speed ({unit} per s)")
    axes.set_ylim(0, 1.15 * max(rates))
    return []


def _draw_step_time(record: RunRecord, points: Sequence[StepPoint], axes: Axes) -> Sequence[Artist]:
    """Seconds of each step by phase; the key has their medians."""
    steps = [p.last for p in points]
    parts = [[p.parts_s[name] / p.steps for p in points] for name in PARTS]
    totals = [p.step_s for p in points]
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


def _draw_traffic(
    points: Sequence[StepPoint], links: Sequence[str], axes: Axes
) -> Sequence[Artist]:
    """Bytes per step on each of `links`."""
    moved = {link: [p.traffic_bytes[link] / p.steps for p in points] for link in links}
    size, unit = byte_unit(int(max(max(each) for each in moved.values())))
    for link, each in moved.items():
        colour, style = LINK_LINES[link]
        heights = [nbytes / size for nbytes in each]
        steps = [p.last for p in points]
        axes.plot(steps, heights, color=colour, linestyle=style, label=LINK_WORDS[link])
    axes.set_ylim(0, None)
    axes.set_ylabel(f"moved per step ({unit})")
    return axes.lines


# Memory, stacked by kind, and its limits

_MOST_NARROW = 120  # moments
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
        """The bytes that hetero holds."""
        return sum(self.kinds.values())


def moments(record: RunRecord, tier: Tier, most: int = _MOST_DRAWN) -> list[Moment]:
    """No more than a chart can show; of several those at which most was held."""
    ends_s = list(accumulate((p.seconds for p in record.points), initial=record.begin_s))
    found = []
    for point in record.points:
        for s in point.samples:
            beside = {Tier.HOST: s.rss_bytes, Tier.DEVICE: s.beside_bytes}.get(tier, 0)
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
        _draw_tier(axes, record, tier, narrow)
        if narrow or axes is panels[-1]:
            step_axis(axes, *record.first_and_last)
    return figure


def _draw_tier(axes: Axes, record: RunRecord, tier: Tier, narrow: bool = False) -> None:
    """Draws what the tier held, and its limits; the caller gives the axis of steps."""
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
    axes.set_title(_tier_finding(record, tier, "\n" if narrow else " "))
    axes.set_ylabel(f"held ({unit})")
    axes.set_ylim(0, 1.08 * top)
    axes.grid(axis="y")
    key(axes, entries, narrow)


def _tier_finding(record: RunRecord, tier: Tier, gap: str) -> str:
    """What there is to see of a tier, in one line, or two with a `gap` that is a line's end."""
    peak, budget = record.peak_bytes[tier], record.largest_budget(tier)
    words = f"Model state {TIER_PLACES[tier]}: at most {format_bytes(peak)}"
    if budget is None:
        return f"{words},{gap}without a budget"
    return f"{words}{gap}{record.limit_words(tier)} ({peak / budget:.0%})"


def memory_finding(record: RunRecord) -> str:
    """The verdict on budgets."""
    limited = [tier for tier in record.used_tiers if record.largest_budget(tier) is not None]
    if not limited:
        return "Memory: no budget was given"
    if record.passed_budgets:
        return "Memory passed a budget"
    return f"Memory stayed within its budget{'s' if len(limited) > 1 else ''}"


# Placement: which kind of each chunk's state is where

KINDS = (MemoryKind.PARAM, MemoryKind.GRAD, MemoryKind.OPTIM_STATE)
_MOST_EDGED = 120  # chunks: with more, edges would hide the colours
_NAME_WIDTH = 2.2  # inches for the name of a chunk's first parameter
_LEAST_NAMED = 0.6  # inches: narrower parts of a row have no room for a word
_LONGEST_NAME = 26
_BAND = 0.84


def draw_placement(record: RunRecord, narrow: bool = False) -> Figure:
    """A row for each kind of state, and the model's chunks from left to right."""
    chunks = record.chunks
    width = HALF_WIDTH if narrow else FULL_WIDTH
    figure = new_figure(width, 2.5)
    axes = figure.add_subplot()
    ends = list(accumulate(chunk.nbytes for chunk in chunks))
    begins = [0, *ends[:-1]]
    for row, kind in enumerate(KINDS):
        _draw_row(axes, chunks, begins, row, kind, _LEAST_NAMED / width)
        # The kind's colour in front of its row, as all pictures have it.
        place, across = (-0.012, row - _BAND / 2), axes.get_yaxis_transform()
        colour = KIND_COLOURS[kind]
        stripe = Rectangle(place, 0.008, _BAND, color=colour, transform=across, clip_on=False)
        axes.add_patch(stripe)
    _name_chunks(axes, chunks, begins, int(width / _NAME_WIDTH))
    axes.set_yticks(range(len(KINDS)), [kind.value for kind in KINDS])
    axes.set_ylim(len(KINDS) - 0.5, -0.5)
    axes.set_xlim(0, ends[-1])
    axes.tick_params(axis="y", length=0, pad=10)
    axes.set_xlabel("chunks in the model's order; width: bytes")
    axes.spines[["left", "bottom"]].set_visible(False)
    used = [tier for tier in Tier if any(tier in c.homes.values() for c in chunks)]
    handles = [Patch(color=TIER_COLOURS[tier], label=TIER_WORDS[tier]) for tier in used]
    if any(home is None for c in chunks for home in c.homes.values()):
        handles.append(Patch(facecolor=GROUND, edgecolor=QUIET, hatch="///", label="frozen: none"))
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
    return figure


def _draw_row(
    axes: Axes,
    chunks: tuple[ChunkHomes, ...],
    begins: list[int],
    row: int,
    kind: MemoryKind,
    least_named: float,
) -> None:
    edged = len(chunks) <= _MOST_EDGED
    total = begins[-1] + chunks[-1].nbytes
    pairs = list(zip(chunks, begins, strict=True))
    for home, run in groupby(pairs, key=lambda pair: pair[0].homes[kind]):
        some = list(run)
        begin, end = some[0][1], some[-1][1] + some[-1][0].nbytes
        cells = [(at, chunk.nbytes) for chunk, at in some] if edged else [(begin, end - begin)]
        axes.broken_barh(
            cells,
            (row - _BAND / 2, _BAND),
            facecolors=GROUND if home is None else TIER_COLOURS[home],
            edgecolors=FAINT if home is None else GROUND,
            hatch="///" if home is None else None,
            linewidth=0.6 if edged else 0,
        )
        if home is not None and end - begin > least_named * total:
            words, middle, ink = TIER_WORDS[home], (begin + end) / 2, ink_on(TIER_COLOURS[home])
            axes.text(middle, row, words, ha="center", va="center", color=ink, weight="bold")


def _name_chunks(axes: Axes, chunks: tuple[ChunkHomes, ...], begins: list[int], count: int) -> None:
    """Names the first parameter of some chunks, about as far from one another."""
    total = begins[-1] + chunks[-1].nbytes
    ticks: list[tuple[int, str]] = []
    for chunk, begin in zip(chunks, begins, strict=True):
        if begin >= len(ticks) * total / count and len(ticks) < count:
            name = chunk.name.split(" ")[0]
            if len(name) > _LONGEST_NAME:
                name = f"\N{HORIZONTAL ELLIPSIS}{name[-_LONGEST_NAME + 1 :]}"
            ticks.append((begin, name))
    axes.set_xticks([at for at, _ in ticks], [name for _, name in ticks], ha="left")
    axes.tick_params(axis="x", labelsize=FONT_SIZE - 2, length=4)


def placement_finding(record: RunRecord) -> str:
    """Where each kind of state is, in one sentence."""
    parts = []
    for kind in KINDS:
        homes = Counter(c.homes[kind] for c in record.chunks if c.homes[kind] is not None)
        if homes:
            places = " and ".join(
                f"{homes[tier]} {TIER_PLACES[tier]}" for tier in Tier if homes[tier]
            )
            parts.append(f"{kind.value} of {places}")
    count = len(record.chunks)
    return f"{count} chunk{'s' if count != 1 else ''}: {'; '.join(parts)}"


# What a step was predicted to take, and what it took

_LEAST_PART = 0.7  # inches: shorter parts of a bar have no room for a name
_LETTER = 0.085  # inches, about


def draw_prediction(
    record: RunRecord, predicted: Mapping[str, Any], narrow: bool = False
) -> Figure:
    """Two bars, one above the other, by phase."""
    width = HALF_WIDTH if narrow else FULL_WIDTH
    figure = new_figure(width, 1.5)
    axes = figure.add_subplot()
    measured = record.part_s
    longest = max(sum(measured.values()), predicted["step_s"])
    inch = 1.25 * longest / width
    _draw_bar(axes, 0, predicted["phases_s"], inch)
    _draw_bar(axes, 1, measured, inch)
    axes.set_yticks([0, 1], ["predicted", "measured"])
    axes.set_ylim(1.5, -0.5)
    axes.set_xlim(0, longest + 0.7 * inch)
    axes.set_xlabel("time of a step (s)")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    return figure


def _draw_bar(axes: Axes, row: int, seconds: Mapping[str, float], inch: float) -> None:
    """One bar; `inch` is so many seconds."""
    begin = 0.0
    for name, length in seconds.items():
        colour = _phase_colour(name)
        axes.barh(row, length, left=begin, height=0.7, color=colour, edgecolor=GROUND)
        if length > _LEAST_PART * inch:
            # A name may be longer than its part.
            room = int(length / inch / _LETTER)
            words = name if len(name) <= room else f"{name[: room - 1]}\N{HORIZONTAL ELLIPSIS}"
            middle = begin + length / 2
            axes.text(middle, row, words, ha="center", va="center", color=ink_on(colour))
        begin += length
    axes.text(begin + 0.06 * inch, row, f"{begin:.3g} s", va="center")


def _phase_colour(name: str) -> str:
    """Of a phase; of phases together that of the first."""
    for part, colour in (*PHASE_COLOURS.items(), ("update", PHASE_COLOURS["optimizer"])):
        if name.startswith(part):
            return colour
    return REST_COLOUR
