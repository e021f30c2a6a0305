"""docs/compatibility.md says what comes of each touch: every cell is made again, and compared.

`python -m tests.support.compatibility` writes the tables.
"""

from __future__ import annotations

import pytest

from tests.support.compatibility.page import PAGE, cells_of, page_of
from tests.support.compatibility.runs import (
    COLUMNS,
    TOUCHES,
    TWO_RANKS,
    outcome,
    outcomes_of_ranks,
)
from tests.support.compatibility.touches import SECTIONS
from tests.support.ranks.processes import RankPool

PAGE_TEXT = PAGE.read_text()
CELLS = cells_of(PAGE_TEXT)
OF_ONE_RANK = [column for column in COLUMNS if column != TWO_RANKS]


def is_extra(number: int, name: str, column: str) -> bool:
    """Whether the page says of the column what it says of "nvme", which is always checked; of every
    tenth touch all columns are."""
    same = CELLS.get((name, column)) == CELLS.get((name, "nvme"))
    return same and column != "nvme" and number % 10 > 0


def expect(name: str, column: str, found: str) -> None:
    """The cell that was found is the page's."""
    said = CELLS[name, column]
    assert found == said, (
        f"{name}, column {column}: found {found!r}, and docs/compatibility.md says {said!r}; if "
        f"that is right now, write its tables again: python -m tests.support.compatibility"
    )


def test_the_page_has_a_row_for_each_touch_and_nothing_else() -> None:
    found = page_of(PAGE_TEXT, lambda name, column: CELLS.get((name, column), "missing"))
    assert found == PAGE_TEXT
    assert not [where for where, cell in CELLS.items() if cell == "" or "wrong" in cell]


@pytest.mark.parametrize(
    ("name", "column"),
    [
        pytest.param(name, column, marks=[pytest.mark.extra] * is_extra(number, name, column))
        for number, name in enumerate(TOUCHES)
        for column in OF_ONE_RANK
    ],
)
def test_one_rank(name: str, column: str) -> None:
    expect(name, column, outcome(name, column))


def of_section(number: int, every: bool) -> list[str]:
    """Names of a section's touches: of `every` one, or else of each tenth, and of those of which
    the page says something else than in the column "nvme"."""
    numbers = {name: number for number, name in enumerate(TOUCHES)}
    return [
        name
        for name in (touch.name for touch in SECTIONS[number].touches)
        if every
        or numbers[name] % 10 == 0
        or CELLS.get((name, TWO_RANKS)) != CELLS.get((name, "nvme"))
    ]


@pytest.mark.parametrize(
    "every", [pytest.param(False, id="some"), pytest.param(True, id="all", marks=pytest.mark.extra)]
)
@pytest.mark.parametrize(
    "section", range(len(SECTIONS)), ids=[section.title for section in SECTIONS]
)
def test_two_ranks(section: int, every: bool, ranks2: RankPool) -> None:
    """A call has the touches of a section, because starting one takes longer than a touch."""
    for name, found in outcomes_of_ranks(ranks2, of_section(section, every)).items():
        expect(name, TWO_RANKS, found)
