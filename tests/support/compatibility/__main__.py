"""Writes the tables of docs/compatibility.md: `python -m tests.support.compatibility`."""

from __future__ import annotations

import sys

import torch

from tests.support.compatibility.page import PAGE, page_of
from tests.support.compatibility.runs import (
    COLUMNS,
    TOUCHES,
    TWO_RANKS,
    WRONG,
    outcome,
    outcomes_of_ranks,
)
from tests.support.compatibility.touches import SECTIONS
from tests.support.ranks.processes import RankPool


def main() -> int:
    """Makes all cells; where one is wrong, it is shown and nothing is written."""
    torch.set_num_threads(1)
    cells = {}
    with RankPool(2) as ranks:
        for section in SECTIONS:
            names = [touch.name for touch in section.touches]
            for name, cell in outcomes_of_ranks(ranks, names).items():
                cells[name, TWO_RANKS] = cell
    for name in TOUCHES:
        for column in COLUMNS:
            if column != TWO_RANKS:
                cells[name, column] = outcome(name, column)
    wrong = {where: cell for where, cell in cells.items() if cell.startswith(WRONG)}
    for (name, column), cell in wrong.items():
        print(f"{name}, {column}: {cell}")
    if not wrong:
        page = page_of(PAGE.read_text(), lambda name, column: cells[name, column])
        PAGE.write_text(page)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
