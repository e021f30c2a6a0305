"""docs/compatibility.md: its head, and a table for each section of touches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.compatibility.runs import COLUMNS
from tests.support.compatibility.touches import SECTIONS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "compatibility.md"

_HEAD = """\
# Compatibility
"""


def line_of(name: str, cells: dict[str, str]) -> str:
    """A touch's row."""
    return f"| {name} | " + " | ".join(cells[column] for column in COLUMNS) + " |"


def page_of(cell_of: Callable[[str, str], str]) -> str:
    """The whole page; `cell_of` takes a touch's name and a column's."""
    parts = [_HEAD]
    for section in SECTIONS:
        parts.append(f"\n## {section.title}\n\n| | {' | '.join(COLUMNS)} |")
        parts.append("|---|" + "---|" * len(COLUMNS))
        for touch in section.touches:
            cells = {column: cell_of(touch.name, column) for column in COLUMNS}
            parts.append(line_of(touch.name, cells))
    return "\n".join(parts) + "\n"
