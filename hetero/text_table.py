"""Tables and lines of plain text that fit a terminal; no cell is cut."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

_WIDTHS = 60, 200  # columns that a terminal is taken to have
_ELSEWHERE = 120  # columns, where there is no terminal that says
Column = tuple[list[str], list[str]]  # the lines of its title, and its cells

_LEAST_TEXT = 24  # columns of a last cell; with less the first cell has a line of its own
_BETWEEN = "  "


def terminal_width() -> int:
    """Columns of the terminal, or of COLUMNS in the environment."""
    least, most = _WIDTHS
    return min(most, max(least, shutil.get_terminal_size((_ELSEWHERE, 24)).columns))


def wrapped(text: str, width: int | None) -> list[str]:
    """The lines of a text of at most `width` columns, as far as words allow; None: as they are."""
    if width is None:
        return text.splitlines()
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    return [line for each in text.splitlines() for line in wrapper.wrap(each) or [""]]


def columns(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Lines of cells to the left; the last cell of a row is a text, which is wrapped."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    indent = sum(widths) + len(widths) * len(_BETWEEN)
    is_apart = indent > width - _LEAST_TEXT and len(rows[0]) > 1
    if is_apart:
        indent += len(_BETWEEN) - widths[0]
    lines = []
    for row in rows:
        cells = [cell.ljust(w) for cell, w in zip(row, widths, strict=False)]
        if is_apart:
            lines.append(row[0])
            cells[0] = ""
        begin = _BETWEEN.join([*cells, ""])
        for text in wrapped(row[-1], max(_LEAST_TEXT, width - indent)) or [""]:
            lines.append((begin + text).rstrip())
            begin = " " * indent
    return lines


def table(rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Columns of figures below a row of titles; the first to the left, the others to the right.

    Where they take more than `width` columns, titles have several lines, and what then still finds
    no room comes in a table below. None: as wide as they are.
    """
    cells = list(zip(*rows, strict=True))
    full: list[Column] = [([title], others) for title, *others in cells]
    if width is None or _width(full) <= width:
        return _block(full)
    narrow: list[Column] = []
    for title, *others in cells:
        longest = max(map(len, [*title.split(), *others, " "]))
        narrow.append((textwrap.wrap(title, longest, break_long_words=False) or [""], others))
    first, *rest = narrow
    blocks, now = [], [first]
    for column in rest:
        if len(now) > 1 and _width([*now, column]) > width:
            blocks.append(_block(now))
            now = [first]
        now.append(column)
    return "\n\n".join([*blocks, _block(now)])


def _column_width(column: Column) -> int:
    titles, others = column
    return max(map(len, [*titles, *others]))


def _width(block: Sequence[Column]) -> int:
    return sum(map(_column_width, block)) + len(_BETWEEN) * (len(block) - 1)


def _block(block: Sequence[Column]) -> str:
    height = max(len(titles) for titles, _ in block)
    padded = [[""] * (height - len(titles)) + [*titles, *others] for titles, others in block]
    lines = []
    for first, *others in zip(*padded, strict=True):
        aligned = [
            cell.rjust(_column_width(column))
            for cell, column in zip(others, block[1:], strict=True)
        ]
        lines.append(_BETWEEN.join([first.ljust(_column_width(block[0])), *aligned]).rstrip())
    lines.insert(height, "-" * max(map(len, lines)))
    return "\n".join(lines)
