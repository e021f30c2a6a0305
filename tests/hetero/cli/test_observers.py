"""hetero/cli/observers: what `hetero train --live` draws, and where it does not."""

from __future__ import annotations

import io
import os
import pty
import sys

import pytest
from rich.console import Console

from hetero.cli.observers import LineObserver, ScreenObserver, make_observer, sparkline
from tests.support.train_results import make_result


def drawn(steps: int, width: int = 120, detailed: bool = True) -> str:
    """What is on the screen at the end of a run."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, height=40, color_system=None)
    observer, result = ScreenObserver(console, detailed), make_result(steps)
    observer.begin(result.facts)
    for metrics in result.points:
        observer.step(metrics)
    observer.end()
    return stream.getvalue()


def test_memory_is_beside_its_budgets_and_loss_and_speed_are_there() -> None:
    text = drawn(5)
    assert "model tiny: 10.0M parameters" in text
    last = text[text.rindex("hetero train tiny") :]
    assert "step 5/5" in text
    for words in (
        "200.0 MiB of 300.0 MiB, at most 200.0 MiB",
        "95.0 MiB of 1.0 TiB",
        "800.0 MiB no limit, at most 800.0 MiB",
        "▁ 1.0000",
        "50 tokens/s, 2.000 s per step",
        "NVMe read 35 B, NVMe written 9 B",
    ):
        assert words in last, words
    assert "device" not in last, "nothing was there"


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_gets_no_line_that_is_wider(width: int) -> None:
    text = drawn(250, width=width)
    last = text[text.rindex("hetero train tiny") :]
    assert max(map(len, last.splitlines())) <= width
    assert "…" not in last, "no figure is cut"
    assert "tokens/s" in last
    if width >= 80:
        held = [line for line in last.splitlines() if "at most" in line and "MiB" in line]
        assert len(held) == 3, "one line each"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_bar_has_figures_that_are_whole(width: int) -> None:
    text = drawn(3, width, detailed=False)
    assert "50 tok/s" in text[text.rindex("loss") :]
    assert ("read" in text[text.rindex("loss") :]) == (width == 120)
    assert "…" not in text


def test_a_sparkline_goes_from_the_lowest_to_the_highest() -> None:
    assert sparkline([3.0, 1.0, 2.0]) == "█▁▄"
    assert sparkline([2.0, 2.0]) == "▁▁"


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
