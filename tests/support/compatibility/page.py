"""docs/compatibility.md: its tables and numbers of touches are made, its text is written there.

So is what is said of the keys that are taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hetero.compat import fsdp, oneflow
from hetero.compat.colossalai import argument_keys
from hetero.compat.deepspeed import config_keys
from hetero.compat.key_table import Key, KeyTable, Treatment
from tests.support.compatibility.runs import COLUMNS
from tests.support.compatibility.touches import SECTIONS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "compatibility.md"
_KEY_TABLES = (
    *(*config_keys.TABLES, *argument_keys.TABLES),
    *(fsdp.ARGUMENTS, fsdp.METHODS, oneflow.METHODS),
)


def page_of(page: str, cell_of: Callable[[str, str], str]) -> str:
    """The page with its tables made again, each below its heading.

    `cell_of` takes a touch's name and a column's.
    """
    tables = {f"#### `{table.name}`": _keys(table, page) for table in _KEY_TABLES}
    count = all_touches = 0
    for section in SECTIONS:
        rows = {t.name: [cell_of(t.name, column) for column in COLUMNS] for t in section.touches}
        others = {name: cells for name, cells in rows.items() if set(cells) != {"same"}}
        tables[f"### {section.title}"] = _table(
            ["touch", *COLUMNS], ([name, *cells] for name, cells in others.items())
        )
        tables[f"### {section.title}: the same"] = _table(
            ["touch"], ([name] for name in rows if name not in others)
        )
        number = re.compile(rf"^(- {re.escape(section.title)}), \d+:", re.MULTILINE)
        page = number.sub(rf"\1, {len(others)}:", page)
        count, all_touches = count + len(others), all_touches + len(rows)
    page = re.sub(r"\d+ of \d+ touches", f"{count} of {all_touches} touches", page)
    for heading, table in tables.items():
        parts = re.split(rf"^{re.escape(heading)}\n\n(?:\|.*\n)*", page, flags=re.MULTILINE)
        assert len(parts) == 2, f"the page must have the heading {heading!r} once"
        page = f"{heading}\n\n{table}".join(parts)
    heads = re.findall(r"^\| (?:touch|keys) \|", page, re.MULTILINE)
    assert len(heads) == len(tables), "the page has tables of what there is not"
    return page


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |\n" for row in (head, *rows)]
    return "".join([lines[0], "|---" * len(head), "|\n", *lines[1:]])


def _keys(table: KeyTable, page: str) -> str:
    """All keys of another project's options, of which those of one treatment and reason are a row.

    Rows of keys that are taken are the page's own, which must name each once.
    """
    other_names: dict[str, list[str]] = {}
    for alias, name in table.aliases.items():
        other_names.setdefault(name, []).append(alias)
    of_reason: dict[Key, list[str]] = {Key(Treatment.TAKEN): []}
    for name, key in table.keys.items():
        of_reason.setdefault(key, []).extend((name, *other_names.get(name, ())))
    taken = of_reason.pop(Key(Treatment.TAKEN))
    below = re.search(rf"^#### `{re.escape(table.name)}`\n\n((?:\|.*\n)*)", page, re.MULTILINE)
    lines = [] if below is None else below[1].splitlines()
    rows = [line[2:-2].split(" | ") for line in lines]
    written = [row for row in rows if row[1:2] in (["honoured"], ["mapped"])]
    named = re.findall(r"`(\w+)`", " ".join(row[0] for row in written))
    assert sorted(named) == sorted(taken), f"{table.name}: write rows for the keys that are taken"
    return _table(
        ["keys", "treatment", "what they do, or why not"],
        [
            *written,
            *(
                [", ".join(f"`{each}`" for each in names), key.treatment.value, key.reason]
                for key, names in of_reason.items()
            ),
        ],
    )


def cells_of(page: str) -> dict[tuple[str, str], str]:
    """The cells of a page by their touch's name and their column."""
    rows = [line[2:-2].split(" | ") for line in page.splitlines() if line.startswith("| ")]
    found = {}
    for name, *cells in rows:
        if not cells and name != "touch":
            cells = ["same"] * len(COLUMNS)
        if len(cells) == len(COLUMNS):
            found.update(((name, c), cell) for c, cell in zip(COLUMNS, cells, strict=True))
    return found
