"""Tables of text: nothing is cut, and nothing is wider than asked for."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.text_table import columns, table, terminal_width, wrapped

WORD = st.text("abc12.-", min_size=1, max_size=9)
WORDS = st.lists(WORD, min_size=1, max_size=6).map(" ".join)
WIDTH = st.integers(60, 200)


def words(text: str) -> list[str]:
    return sorted(re.sub(r"^-+$", "", text, flags=re.MULTILINE).split())


@given(st.integers(1, 9).flatmap(lambda n: st.lists(st.tuples(*[WORD] * n), min_size=1)), WIDTH)
def test_a_table_has_every_figure(rows: list[tuple[str, ...]], width: int) -> None:
    rows = [tuple(cell + "x" for cell in row) for row in rows]  # no cell is a line of dashes
    text = table(rows, width)
    assert max(map(len, text.splitlines())) <= width
    firsts = [row[0] for row in rows]
    parts = text.split("\n\n")
    cells = [cell for row in rows for cell in row]
    assert words(text) == sorted(cells + firsts * (len(parts) - 1))
    if len(parts) == 1:
        assert text == table(rows)


@given(st.lists(st.tuples(WORD, WORD, WORDS), min_size=1), WIDTH)
def test_rows_of_text_have_every_word(rows: list[tuple[str, ...]], width: int) -> None:
    lines = columns(rows, width)
    assert max(map(len, lines)) <= width
    assert " ".join(" ".join(row) for row in rows).split() == " ".join(lines).split()


def test_titles_break_before_tables_do() -> None:
    rows = [("seconds", "link to device", "update in RAM"), ("step " * 9, "0.383", "0.214")]
    assert [line[45:].split() for line in table(rows, 70).splitlines()[:3]] == [
        ["link"],
        ["to", "update"],
        ["device", "in", "RAM"],
    ]
    assert table(rows).splitlines()[0].endswith("link to device  update in RAM")


def test_a_first_cell_that_leaves_no_room_has_its_own_line() -> None:
    name = "a.module.whose.name.is.longer.than.one.would.like"
    assert columns([(name, "3", "some words of a text")], 60) == [
        name,
        "  3  some words of a text",
    ]
    assert columns([], 60) == []
    assert wrapped("a\n\nb", 60) == ["a", "", "b"]


@pytest.mark.parametrize(("said", "width"), [("20", 60), ("80", 80), ("999", 200)])
def test_the_width_of_a_terminal(monkeypatch: pytest.MonkeyPatch, said: str, width: int) -> None:
    monkeypatch.setenv("COLUMNS", said)
    assert terminal_width() == width
