"""Figures as tables: columns are declared once, and rows are figures by name.

A figure is a number, or a spread: {"median", "min", "max"} over rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hetero.text_table import table, terminal_width
from offload.memory.sizes import format_bytes

Show = Callable[[Any], str]
# A column's title, the figure below it by its key, and how that is shown.
Column = tuple[str, str, Show]
_SPREAD = ("median", "min", "max")


def middle(value: Any) -> Any:
    """A figure, or the median of one that has a spread."""
    return value["median"] if isinstance(value, Mapping) else value


def number(digits: int = 2, factor: float = 1.0) -> Show:
    """As a number of so many digits, `factor` times the figure."""
    return lambda value: f"{factor * middle(value):,.{digits}f}"


def ranged(digits: int = 2, factor: float = 1.0) -> Show:
    """As a number, with the least and the most of all rounds."""

    def show(value: Any) -> str:
        if not isinstance(value, Mapping):
            return f"{factor * value:,.{digits}f}"
        median, least, most = (f"{factor * value[key]:,.{digits}f}" for key in _SPREAD)
        return f"{median} ({least}-{most})"

    return show


def size(value: Any) -> str:
    """As bytes."""
    return format_bytes(round(middle(value)))


def of_figures(title: str, rows: Mapping[str, Mapping[str, Any]], columns: Sequence[Column]) -> str:
    """A table of rows by name, below its title.

    A row that has no such figure, or None, has an empty cell; a column without a figure is left
    out, and without rows the table is empty.
    """
    kept = [
        column for column in columns if any(r.get(column[1]) is not None for r in rows.values())
    ]
    cells = [["", *(head for head, _, _ in kept)]]
    for name, row in rows.items():
        found = ((show, row.get(key)) for _, key, show in kept)
        cells.append([name, *("" if figure is None else show(figure) for show, figure in found)])
    width = terminal_width() if sys.stdout.isatty() else None
    return f"\n{title}\n{table(cells, width)}\n" if rows else ""
