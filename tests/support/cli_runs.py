"""Runs of `hetero train` and its like, inside of the process of a test."""

from __future__ import annotations

import pytest


def draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets runs leave out the picture and the page, which take longer than a few small steps."""
    monkeypatch.setattr("hetero.cli.show.figure.draw_figure", lambda *given: None)
    monkeypatch.setattr("hetero.reporting.page.page.write_page", lambda *given: None)
