"""The picture of a timeline: one band per lane, seconds to the right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Shape

from hetero.reporting.drawing import new_figure
from hetero.reporting.palette import GROUND, INK, LANE_COLOURS, PHASE_COLOURS, QUIET, ink_on
from offload.timeline import LANES, Interval, LaneName, Timeline, union

_WORKERS: tuple[LaneName, ...] = ("update", "nvme_read", "nvme_write", "h2d", "d2h")
_WAITS: tuple[LaneName, ...] = ("gather", "activation")

Span = tuple[float, float]  # from when until when

_BAND = 0.76  # of the height that a lane has
# Of the width: narrower intervals have no room for their name, or for an edge.
_LEAST_NAMED = 0.08
_LEAST_EDGED = 0.004
_NO_WAIT = 1 / 2000  # a chunk that was there: lines as thin as can be would show it as a wait


def hidden_spans(timeline: Timeline) -> list[Span]:
    """From when until when forward or backward computed while anything was updated or moved.

    Forward and backward do not compute while they wait for a chunk or an activation: what is
    moved then hides behind nothing. Seconds of time.perf_counter(), in order, none over another.
    """
    computing = union(i for i in timeline.of("compute") if i.name != "optimizer")
    working = union(i for lane in _WORKERS for i in timeline.of(lane))
    waiting = union(i for lane in _WAITS for i in timeline.of(lane))
    # How many of the two go on, and less than two while compute waits.
    changes: Counter[float] = Counter()
    for spans, counts in ((computing, 1), (working, 1), (waiting, -2)):
        for begin, end in spans:
            changes[begin] += counts
            changes[end] -= counts
    at = sorted(changes)
    levels = accumulate(changes[edge] for edge in at)
    return [span for span, level in zip(pairwise(at), levels, strict=False) if level == 2]


def hidden_finding(timeline: Timeline) -> str:
    """How much of the work beside compute was hidden behind it, in one sentence."""
    busy_s = timeline.busy_s(*_WORKERS)
    hidden_s = sum(end - begin for begin, end in hidden_spans(timeline))
    if not busy_s:
        return "Nothing was updated or moved during compute"
    return (
        f"{hidden_s / busy_s:.0%} of the {busy_s:.3g} s of updates and transfers ran behind forward"
        f" and backward"
    )


def make_figure(timeline: Timeline, width: float, lane_height: float) -> Figure:
    """The picture, so many inches wide, and per lane so high."""
    hidden = hidden_spans(timeline)
    names = [LANES[lane] for lane in timeline.lanes]
    notes = [_figures(timeline, lane) for lane in timeline.lanes]
    if hidden:
        names.append("overlap: work during\nforward or backward")
        share = sum(end - begin for begin, end in hidden) / max(timeline.seconds, 1e-9)
        notes.append(f"{share:.0%}")
    figure = new_figure(width, 1.0 + lane_height * max(1, len(names)))
    axes = figure.add_subplot()
    for place, lane in enumerate(timeline.lanes):
        _draw_lane(axes, timeline, lane, place)
    _draw_spans(axes, timeline, hidden, (len(names) - 1 - _BAND / 4, _BAND / 2), INK)
    for place, note in enumerate(notes):  # beside the right end of the row
        at, where = (1.008, place), ("axes fraction", "data")
        axes.annotate(note, at, xycoords=where, va="center", color=QUIET)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(max(1, len(names)) - 0.45, -0.55)
    axes.set_xlim(0, max(timeline.seconds, 1e-9))
    axes.set_xlabel("time (s)")
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    return figure


def _draw_spans(
    axes: Axes,
    timeline: Timeline,
    spans: Sequence[Span],
    row: tuple[float, float],
    colour: str,
    edged: bool = False,
) -> None:
    """Rectangles in a row from a height, and so high, as one shape: a step has thousands.

    `edged`: told apart from neighbours.
    """
    if not spans:
        return
    bottom, top = row[0], row[0] + row[1]
    corners = []
    for span in spans:
        begin, end = (edge - timeline.begin_s for edge in span)
        corners += [(begin, bottom), (begin, top), (end, top), (end, bottom), (begin, bottom)]
    codes = [Shape.MOVETO, Shape.LINETO, Shape.LINETO, Shape.LINETO, Shape.CLOSEPOLY] * len(spans)
    edge, width = (GROUND, 0.4) if edged else (colour, 0.3)
    shape = Shape(corners, codes)
    axes.add_patch(PathPatch(shape, facecolor=colour, edgecolor=edge, linewidth=width))


def _draw_lane(axes: Axes, timeline: Timeline, lane: LaneName, place: int) -> None:
    rows, whole_s = timeline.rows(lane), timeline.seconds
    height = _BAND / len(rows)
    for number, row in enumerate(rows):
        bottom = place - _BAND / 2 + number * height
        alike: dict[tuple[str, bool], list[Span]] = {}
        for i in row:
            if lane != "gather" or i.seconds >= _NO_WAIT * whole_s:
                look = _colour(i), i.seconds > _LEAST_EDGED * whole_s
                alike.setdefault(look, []).append((i.begin_s, i.end_s))
            if i.name and i.seconds > _LEAST_NAMED * whole_s:
                middle = (i.begin_s + i.end_s) / 2 - timeline.begin_s
                at, ink = (middle, bottom + height / 2), ink_on(_colour(i))
                axes.text(*at, i.name, ha="center", va="center", color=ink)
        for (colour, edged), spans in alike.items():
            _draw_spans(axes, timeline, spans, (bottom, height), colour, edged)


def _colour(interval: Interval) -> str:
    return PHASE_COLOURS.get(interval.name, LANE_COLOURS[interval.lane])


def _figures(timeline: Timeline, lane: LaneName) -> str:
    """How much of the time the lane was busy, and the bytes that it moved."""
    share = timeline.busy_s(lane) / timeline.seconds if timeline.seconds else 0.0
    nbytes = timeline.nbytes(lane)
    words = "<1%" if 0 < share < 0.005 else f"{share:.0%}"
    return words + (f", {nbytes / 1e9:.2f} GB" if nbytes else "")
