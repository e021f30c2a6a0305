"""Labels beside what they name, so that a chart needs no legend."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hetero.reporting.page.palette import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FONT_SIZE = 10
# In pixels per point of font size, spacing included, at the figure's own resolution.
_LINE_HEIGHT = 1.7

SQUARE = "\N{BLACK SQUARE}"  # before words: it alone has the colour

Label = tuple[float, str, str]  # height in data, text, colour


def label_right(axes: Axes, labels: list[Label], font_size: float = FONT_SIZE) -> None:
    """Writes each text beside the right end of what it means, none over another."""
    low, high = axes.get_ylim()
    line = (high - low) * _LINE_HEIGHT * font_size / axes.get_window_extent().height
    bottom = -math.inf
    for height, text, colour in sorted(labels):
        half = line * (1 + text.count("\n")) / 2
        centre = max(height, bottom + half)
        bottom = centre + half
        square, found, words = text.rpartition(SQUARE)
        for part, indent, ink in (
            # The square has the colour, and the words are dark enough to be read.
            (f"{square}{found}", 0.0, colour),
            (words, 0.018 if found else 0.0, INK if found else colour),
        ):
            if part:
                axes.annotate(
                    part,
                    (1, height),
                    xycoords=("axes fraction", "data"),
                    xytext=(1.015 + indent, centre),
                    textcoords=("axes fraction", "data"),
                    va="center",
                    fontsize=font_size,
                    color=ink,
                    annotation_clip=False,
                )
