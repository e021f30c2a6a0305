"""The picture of a timeline: one band per lane, seconds to the right."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from offload.timeline import LANES, Interval, LaneName, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which people who see fewer colours can tell apart.
_PART_COLOURS = {"forward": "#56B4E9", "backward": "#0072B2", "optimizer": "#E69F00"}
_COLOURS: dict[LaneName, str] = {
    "compute": "#999999",
    "gather": "#D55E00",
    "update": "#E69F00",
    "nvme_read": "#009E73",
    "nvme_write": "#CC79A7",
    "h2d": "#56B4E9",
    "d2h": "#0072B2",
}
# Of pictures' names.
SUFFIXES = (".png", ".svg", ".pdf")

_BAND = 0.76  # of the height that a lane has
# Of the width: narrower intervals have no room for their name, or for an edge.
_LEAST_NAMED = 0.08
_LEAST_EDGED = 0.004


def draw_timeline(timeline: Timeline, path: str | os.PathLike[str], title: str) -> None:
    """Writes the picture, in the format of the path's suffix. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lanes = timeline.lanes
    figure = Figure(figsize=(12, 1.5 + 0.62 * max(1, len(lanes))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, lane in enumerate(lanes):
        _draw_lane(axes, timeline, lane, place)
        axes.annotate(
            _figures(timeline, lane),
            (1.008, place),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=9,
            color="#444444",
        )
    axes.set_title(title, loc="left", fontsize=12)
    axes.set_yticks(range(len(lanes)), [LANES[lane] for lane in lanes])
    axes.set_ylim(max(1, len(lanes)) - 0.45, -0.55)
    axes.set_xlim(0, max(timeline.seconds, 1e-9))
    axes.set_xlabel("seconds")
    axes.tick_params(axis="y", length=0, labelsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=140)


def _draw_lane(axes: Axes, timeline: Timeline, lane: LaneName, place: int) -> None:
    rows = timeline.rows(lane)
    least = _LEAST_EDGED * timeline.seconds
    height = _BAND / len(rows)
    for number, row in enumerate(rows):
        bottom = place - _BAND / 2 + number * height
        axes.broken_barh(
            [(i.begin_s - timeline.begin_s, i.seconds) for i in row],
            (bottom, height),
            facecolors=[_colour(i) for i in row],
            edgecolors=["white" if i.seconds > least else _colour(i) for i in row],
            # An edge would show waits of no time.
            linewidth=0 if lane == "gather" else 0.4,
        )
        for i in row:
            if i.name and i.seconds > _LEAST_NAMED * timeline.seconds:
                middle = (i.begin_s + i.end_s) / 2 - timeline.begin_s
                colour = "white" if i.name == "backward" else "black"
                at = (middle, bottom + height / 2)
                axes.text(*at, i.name, ha="center", va="center", fontsize=10, color=colour)


def _colour(interval: Interval) -> str:
    return _PART_COLOURS.get(interval.name, _COLOURS[interval.lane])


def _figures(timeline: Timeline, lane: LaneName) -> str:
    """How much of the time the lane was busy, and the bytes that it moved."""
    share = timeline.busy_s(lane) / timeline.seconds if timeline.seconds else 0.0
    nbytes = timeline.nbytes(lane)
    return f"{share:.0%}" + (f", {nbytes / 1e9:.2f} GB" if nbytes else "")
