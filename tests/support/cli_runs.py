"""Runs of `hetero train` and its like, inside of the process of a test or of its ranks."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hetero.reporting.run_record import RunRecord

# Of the fixtures of these names.
Prints = Callable[..., str]
Refuses = Callable[..., None]


def words_of(*given: str | list[str]) -> list[str]:
    """Arguments that are given as lists, or as strings of words with blanks between."""
    return [word for each in given for word in (each.split() if isinstance(each, str) else each)]


def touch(record: RunRecord, path: Path) -> None:
    """Leaves an empty file in the place of a picture or a page."""
    path.touch()


def draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets runs leave out the picture and the page, which take longer than a few small steps."""
    monkeypatch.setattr("hetero.reporting.charts.draw_picture", touch)
    monkeypatch.setattr("hetero.reporting.page.write_page", touch)


def draw_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the first run alone draw them; of the others there are empty files."""

    def first_of(draw: Callable[[RunRecord, Path], None]) -> Callable[[RunRecord, Path], None]:
        drawn: list[Path] = []

        def draw_or_touch(record: RunRecord, path: Path) -> None:
            path.touch() if drawn else draw(record, path)
            drawn.append(path)

        return draw_or_touch

    for name in ("hetero.reporting.charts.draw_picture", "hetero.reporting.page.write_page"):
        monkeypatch.setattr(name, first_of(pkgutil.resolve_name(name)))


def run_all(rank: int, world: int, folder: str, runs: list[list[str]]) -> None:
    """Runs `hetero` with each list of arguments in a folder, one after another, as a rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("charts", "page"):  # which import matplotlib: half a second of each rank
            undrawn: Any = ModuleType(name)
            undrawn.draw_picture = undrawn.write_page = touch
            patch.setitem(sys.modules, f"hetero.reporting.{name}", undrawn)
        from hetero.cli.main import main

        for arguments in runs:
            assert main(arguments) == 0, arguments
