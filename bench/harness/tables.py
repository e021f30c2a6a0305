"""Figures as tables: columns are declared once, and rows are figures by name.

A figure is a number, or a spread: {"median", "min", "max"} over rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero.text_table import table, terminal_width
from offload.memory.sizes import format_bytes

Show = Callable[[Any], str]
Rows = Mapping[str, Mapping[str, Any]]


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


_SPREAD = ("median", "min", "max")


def size(value: Any) -> str:
    """As bytes."""
    return format_bytes(round(middle(value)))


def most_size(value: Any) -> str:
    """As the most bytes of all rounds."""
    return format_bytes(round(value["max"]))


@dataclass(frozen=True)
class Column:
    """A title, the figure below it by its key, and how it is shown.

    A row that has no such figure, or None, has an empty cell; a column without a figure is left
    out.
    """

    title: str
    key: str
    show: Show = str


@dataclass(frozen=True)
class Table:
    """A title and rows, each made of a program's result, and columns. Without rows it is left out.

    `rows` is a key of the result, or makes the rows of it.
    """

    title: Callable[[Mapping[str, Any]], str]
    rows: str | Callable[[Mapping[str, Any]], Rows]
    columns: Sequence[Column]

    def text(self, result: Mapping[str, Any]) -> str:
        """The table; empty if it has no rows."""
        rows: Rows = result[self.rows] if isinstance(self.rows, str) else self.rows(result)
        return of_figures(self.title(result), rows, self.columns) if rows else ""


def of_figures(title: str, rows: Rows, columns: Sequence[Column]) -> str:
    """A table of rows by name, below its title."""
    kept = [c for c in columns if any(row.get(c.key) is not None for row in rows.values())]
    cells = [["", *(column.title for column in kept)]]
    for name, row in rows.items():
        found = ((column, row.get(column.key)) for column in kept)
        cells.append([name, *("" if f is None else c.show(f) for c, f in found)])
    return titled(title, cells)


def shown(*tables: Table) -> Callable[[Mapping[str, Any]], Iterator[str]]:
    """Shows a result as these tables and then its "notes"."""

    def show(result: Mapping[str, Any]) -> Iterator[str]:
        yield from filter(None, (each.text(result) for each in tables))
        yield from result.get("notes", ())

    return show


def titled(title: str, rows: Sequence[Sequence[str]]) -> str:
    """A table below its title; the first row has the columns' titles."""
    return f"\n{title}\n{table(rows, terminal_width() if sys.stdout.isatty() else None)}\n"
