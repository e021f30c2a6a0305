"""The picture of some training steps: when what computed, waited and moved."""

from __future__ import annotations

import os
from pathlib import Path

from hetero.job.loop import PICTURED_STEPS
from hetero.job.options import TrainOptions
from hetero.job.ranks import Ranks
from hetero.job.result import TrainResult
from offload.timeline import Timeline

SUFFIXES = (".png", ".svg", ".pdf")  # of pictures


def draw_steps(timeline: Timeline, picture: Path, title: str) -> Path:
    """Writes `picture`, in the format of its suffix, and a trace for ui.perfetto.dev beside it.

    Returns the trace's path. Needs matplotlib; raises OSError.
    """
    from hetero.reporting.timeline_chart import draw_timeline

    draw_timeline(timeline, picture, title)
    trace = trace_path(picture)
    timeline.save_trace(trace)
    return trace


def trace_path(picture: Path) -> Path:
    """Where the trace of a picture goes."""
    return picture.with_suffix(".trace.json")


def check_steps_picture(flag: str, picture: Path) -> None:
    """check_picture(), also of the trace that draw_steps() writes beside it."""
    check_picture(flag, picture, trace_path(picture))


def check_picture(flag: str, picture: Path, *beside: Path) -> None:
    """Raises ValueError, in words of the option `flag`, for what could not be written."""
    if picture.suffix not in SUFFIXES:
        raise ValueError(f"{flag} {picture}: a picture's name ends in {', '.join(SUFFIXES)}")
    for path in (picture, *beside):
        if path.is_dir():
            raise ValueError(f"{flag} {picture}: {path} is a folder; name a file")
    if not picture.parent.is_dir():
        raise ValueError(f"{flag} {picture}: there is no folder {picture.parent}; make it first")
    if not os.access(picture.parent, os.W_OK):
        raise ValueError(f"{flag} {picture}: the folder {picture.parent} is not writable")


def wanted_picture(options: TrainOptions, ranks: Ranks) -> Path | None:
    """Where the option says that the timeline goes. Raises ValueError, on all ranks, as
    check_steps_picture() does."""
    if options.timeline is None:
        return None
    picture = Path(options.timeline)

    ranks.from_first(lambda: check_steps_picture("--timeline", picture))
    return picture


def last_steps_title(result: TrainResult) -> str:
    """Of the picture of a run's last steps."""
    last = result.steps[-1].last
    first = max(1, last - PICTURED_STEPS + 1)
    return f"{result.setting.title}, policy {result.setting.policy}, steps {first} to {last}"
