"""How all figures are drawn: their style, files, and a figure as SVG inside an HTML page."""

from __future__ import annotations

import html
import io
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hetero.reporting.palette import FAINT, INK, QUIET

_FONT_SIZE = 9.5  # points, on a page of 9 inches

_STYLE: dict[Any, Any] = {
    # Text stays text: it can be searched and copied, and is sharp in print.
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": _FONT_SIZE,
    "text.color": INK,
    "axes.titlesize": _FONT_SIZE + 0.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.labelsize": _FONT_SIZE,
    "axes.labelcolor": INK,
    "xtick.labelsize": _FONT_SIZE - 0.5,
    "ytick.labelsize": _FONT_SIZE - 0.5,
    "axes.edgecolor": QUIET,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": _FONT_SIZE - 0.5,
    "legend.handlelength": 2.0,
    "legend.borderaxespad": 0.0,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "hatch.linewidth": 0.8,
}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches, whose parts are laid out without overlap."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def styled() -> AbstractContextManager[None]:
    """Inside the block figures are made in the style of all pictures."""
    return mpl.rc_context(_STYLE)


def save(figure: Figure, path: Path) -> None:
    """Writes the picture, in the format of the path's suffix. Raises OSError."""
    figure.savefig(path, dpi=140)


def byte_unit(most: int) -> tuple[int, str]:
    """The unit of an axis of bytes: how many bytes it has, and its name."""
    units = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
    return next((each for each in units if most >= each[0]), (1, "bytes"))


def as_svg(figure: Figure, name: str, words: str) -> str:
    """The figure as an <svg> element; `name` is unique on the page, `words` for who cannot see."""
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # A hundredth of a point cannot be seen, and most of the text is digits.
    text = re.sub(r' d="[^"]+"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)
    # Names of parts are unique within a figure only.
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = text.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    # The page gives the width; the viewBox keeps the proportions.
    head, rest = text.split(">", 1)
    head = re.sub(r'\s(?:width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{html.escape(words)}">{rest}'
