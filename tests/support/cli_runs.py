"""Runs of `hetero train` and its like, inside of the process of a test or of its ranks."""

from __future__ import annotations

import os

import pytest


def draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets runs leave out the picture and the page, which take longer than a few small steps."""
    monkeypatch.setattr("hetero.reporting.charts.draw_picture", lambda *given: None)
    monkeypatch.setattr("hetero.reporting.page.write_page", lambda *given: None)


def run_all(rank: int, world: int, folder: str, runs: list[list[str]]) -> None:
    """Runs `hetero` with each list of arguments in a folder, one after another, as a rank."""
    from hetero.cli.main import main

    os.chdir(folder)
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        for arguments in runs:
            assert main(arguments) == 0, arguments
