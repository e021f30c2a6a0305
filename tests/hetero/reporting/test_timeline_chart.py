"""hetero/reporting/timeline_chart: what was hidden behind compute, and the picture."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given

from hetero.reporting.drawing import save
from hetero.reporting.timeline_chart import hidden_finding, hidden_spans, make_figure
from offload.timeline import Interval, Timeline
from tests.support.timelines import TIMELINE, ticks, timelines


def test_what_is_hidden_behind_forward_and_backward() -> None:
    timeline = Timeline(
        0.0,
        10.0,
        (
            Interval("compute", 0.0, 4.0, name="forward"),
            Interval("compute", 5.0, 8.0, name="backward"),
            Interval("compute", 8.0, 10.0, name="optimizer"),
            Interval("nvme_read", 3.0, 6.0, 1),
            Interval("update", 5.5, 7.0, 1),
            Interval("nvme_write", 9.0, 10.0, 1),
        ),
    )
    assert hidden_spans(timeline) == [(3.0, 4.0), (5.0, 7.0)]
    assert hidden_finding(timeline).startswith("60% of the 5 s of updates and transfers")
    assert "Nothing" in hidden_finding(replace(timeline, intervals=timeline.intervals[:3]))
    waits = (Interval("gather", 3.5, 5.5), Interval("activation", 6.0, 6.5))
    waiting = replace(timeline, intervals=(*timeline.intervals, *waits))
    assert hidden_spans(waiting) == [(3.0, 3.5), (5.5, 6.0), (6.5, 7.0)]


@given(timelines)
def test_what_is_hidden_is_what_both_share(timeline: Timeline) -> None:
    computing = (Interval("compute", 2, 5), Interval("compute", 7, 9))
    whole = replace(timeline, intervals=(*timeline.intervals, *computing))
    spans = hidden_spans(whole)
    shared = ticks(whole, "compute") & ticks(whole, "update", "nvme_read", "h2d")
    assert sum(end - begin for begin, end in spans) == len(shared)
    assert all(a[1] <= b[0] for a, b in pairwise(spans))


@pytest.mark.parametrize("timeline", [TIMELINE, replace(TIMELINE, intervals=())])
def test_picture(timeline: Timeline, tmp_path: Path) -> None:
    save(make_figure(timeline, 9, 0.5), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
