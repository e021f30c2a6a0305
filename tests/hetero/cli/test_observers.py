"""hetero/cli/observers: what `hetero train --live` draws, and where it does not."""

from __future__ import annotations

import io
import os
import pty
import sys

import pytest
from rich.console import Console

from hetero.cli.observers import LineObserver, ScreenObserver, make_observer
from tests.support.run_records import make_record


def drawn(steps: int, width: int = 120, detailed: bool = True) -> str:
    """What is on the screen at the end of a run."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, height=40, color_system=None)
    observer, result = ScreenObserver(console, detailed), make_record(steps)
    observer.begin(result.facts)
    for metrics in result.points:
        observer.step(metrics)
    observer.end()
    return stream.getvalue()


def test_memory_is_beside_its_budgets_and_loss_and_speed_are_there() -> None:
    text = drawn(5)
    assert "model: tiny <net> & co, 10,000,000 parameters" in text
    last = text[text.rindex("step 5/5") :]
    for words in (
        "135.0 MiB of 200.0 MiB",
        "300.0 MiB",
        "400.0 MiB",
        "1.0000",
        "50 tokens/s, 2 s per step",
        "NVMe read 7.0 MiB, NVMe written 1.0 MiB",
    ):
        assert words in last, words
    assert "device" not in last, "nothing was there"


@pytest.mark.parametrize("detailed", [True, False])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal_and_no_figure_is_cut(
    width: int, detailed: bool
) -> None:
    text = drawn(3, width, detailed)
    last = text[text.rindex("step 3/3") :]
    assert max(map(len, last.splitlines())) <= width
    assert "50 tok/s" in last
    assert ("NVMe 300.0 MiB" in " ".join(last.split())) == (detailed or width == 120)
    assert "…" not in text


@pytest.mark.parametrize(
    ("terminal", "live", "detailed"),
    [("dumb", True, False), ("xterm", True, True), ("xterm", False, False)],
)
def test_it_falls_back_where_no_lines_can_be_redrawn(
    terminal: str, live: bool, detailed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", terminal)
    with os.fdopen(theirs, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        made = make_observer(1, live=live)
        monkeypatch.undo()
    os.close(ours)
    assert isinstance(made, ScreenObserver)
    assert made._detailed == detailed


def test_without_a_terminal_there_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    for live in (False, True):
        assert isinstance(make_observer(1, live=live), LineObserver)
