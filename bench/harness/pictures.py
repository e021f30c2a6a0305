"""Figures as pictures: charts are declared, and drawn in the style of all pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Points:
    """What is drawn in a chart, with its name in the key.

    `look` is what matplotlib's plot() takes; of something with a "width" bar() draws bars.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    look: Mapping[str, Any]


@dataclass(frozen=True)
class Chart:
    """Points, and what they are drawn over.

    Attributes:
        title: of the chart.
        x, y: what its axes are.
        points: one after the other.
        key: names the points beside the chart.
        change: what is further done with matplotlib's axes.
    """

    title: str
    x: str
    y: str
    points: Sequence[Points]
    key: bool = True
    change: Callable[[Any], object] = lambda axes: None


def draw(
    path: Path,
    size: tuple[float, float],
    charts: Mapping[str, Chart],
    rows: Sequence[Sequence[str]],
    title: str = "",
) -> None:
    """Writes a picture to `path`, in the format of its suffix.

    `size` is in inches; `rows` are names of charts, of which one that is wider comes several times.
    """
    from hetero.reporting.drawing import new_figure, save, styled

    with styled():
        figure = new_figure(*size)
        for name, axes in figure.subplot_mosaic([list(row) for row in rows]).items():
            chart = charts[name]
            for each in chart.points:
                made = axes.bar if "width" in each.look else axes.plot
                made(each.x, each.y, label=each.label, **each.look)
            axes.set_title(chart.title)
            axes.set_xlabel(chart.x)
            axes.set_ylabel(chart.y)
            axes.set_ylim(bottom=0)
            axes.grid(axis="y")
            if chart.key:
                axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
            chart.change(axes)
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        save(figure, path)
