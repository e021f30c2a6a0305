"""The last part of docs/compatibility.md: other projects' names, and every key of their options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hetero.compat import fsdp, oneflow
from hetero.compat.colossalai import argument_keys
from hetero.compat.deepspeed import config_keys
from hetero.compat.key_table import Key, KeyTable

_PROJECTS = Path(__file__).parent / "projects"


def _rows(table: KeyTable) -> list[str]:
    """A table's keys as a table of the page."""
    other_names: dict[str, list[str]] = {}
    for alias, name in table.aliases.items():
        other_names.setdefault(name, []).append(alias)
    rows = [
        f"#### `{table.name}`",
        "",
        "| keys | treatment | what they do, or why not |",
        "|---|---|---|",
    ]
    of_reason: dict[Key, list[str]] = {}
    for name, key in table.keys.items():
        of_reason.setdefault(key, []).extend((name, *other_names.get(name, ())))
    for key, names in of_reason.items():
        said = ", ".join(f"`{each}`" for each in names)
        rows.append(f"| {said} | {key.treatment.value} | {key.text} |")
    return [*rows, ""]


def _section(project: str, tables: Sequence[KeyTable]) -> str:
    """What is written of a project, and its tables."""
    return "\n".join([_text(project), *(row for table in tables for row in _rows(table))])


def _text(name: str) -> str:
    return (_PROJECTS / f"{name}.md").read_text()


def other_projects() -> str:
    """The part of the page."""
    sections = [
        _text("head"),
        _section("deepspeed", config_keys.TABLES),
        _section("colossalai", argument_keys.TABLES),
        _section("fsdp2", [fsdp.ARGUMENTS, fsdp.METHODS]),
        _section("oneflow", [oneflow.METHODS]),
    ]
    return "\n".join(sections)
