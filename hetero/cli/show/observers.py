"""Chooses the observer that shows a run while it happens, by where stderr goes."""

from __future__ import annotations

import sys

from rich.console import Console

from hetero.cli.job.loop import Observer
from hetero.cli.job.ranks import ALONE, Ranks
from hetero.cli.show.live import LiveObserver
from hetero.cli.show.progress import BarObserver, LineObserver, SilentObserver


def make_observer(log_every: int, ranks: Ranks = ALONE, live: bool = False) -> Observer:
    """The observer that fits where stderr goes; of several ranks the first shows the run.

    `live`: on a terminal that can redraw lines, memory, loss and speed in the place of a bar.
    """
    if not ranks.leads:
        return SilentObserver()
    if not sys.stderr.isatty():
        return LineObserver(sys.stderr, log_every)
    console = Console(stderr=True)
    if live and not console.is_dumb_terminal:
        return LiveObserver(console)
    return BarObserver(console)
