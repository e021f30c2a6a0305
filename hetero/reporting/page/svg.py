"""A matplotlib figure as SVG that can stand in an HTML page beside others."""

from __future__ import annotations

import io
import re
from contextlib import AbstractContextManager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Inches. Drawn at this size text is 9.5 points; the page scales all charts alike.
FULL_WIDTH = 9.0
HALF_WIDTH = 4.4
FONT_SIZE = 9.5

_STYLE: dict[Any, Any] = {
    # Text stays text: it can be searched and copied, and is sharp in print.
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": FONT_SIZE,
    "axes.titlesize": FONT_SIZE,
    "axes.labelsize": FONT_SIZE,
    "xtick.labelsize": FONT_SIZE - 0.5,
    "ytick.labelsize": FONT_SIZE - 0.5,
    "axes.edgecolor": "#888888",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches, whose parts are laid out without overlap."""
    return Figure(figsize=(width, height), layout="constrained")


def styled() -> AbstractContextManager[None]:
    """Inside the block figures are made in the page's style."""
    return mpl.rc_context(_STYLE)


def quiet_grid(axes: Axes, axis: str = "y") -> None:
    """Lines that help to read values, and no more."""
    axes.grid(axis=axis, color="0.9", linewidth=0.8)  # type: ignore[arg-type]


def as_svg(figure: Figure, name: str, words: str) -> str:
    """The figure as an <svg> element; `name` is unique on the page, `words` for who cannot see."""
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Names of parts are unique within a figure only.
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = text.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    # The page gives the width; the viewBox keeps the proportions.
    head, rest = text.split(">", 1)
    head = re.sub(r'\s(?:width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{_quoted(words)}">{rest}'


def _quoted(text: str) -> str:
    for character, entity in (("&", "&amp;"), ('"', "&quot;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(character, entity)
    return text
