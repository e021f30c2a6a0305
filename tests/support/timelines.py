"""Timelines that are made up: random ones in whole seconds, and one that is known."""

from __future__ import annotations

from hypothesis import strategies as st

from offload.timeline import Interval, LaneName, Timeline

TICKS = 12  # of random timelines: whole seconds, so that sums are exact

intervals = st.builds(
    lambda lane, begin, length, nbytes: Interval(lane, begin, begin + length, nbytes),
    st.sampled_from(["update", "nvme_read", "h2d"]),
    st.integers(0, TICKS - 1),
    st.integers(1, 4),
    st.integers(0, 100),
)
timelines = st.lists(intervals, max_size=12).map(lambda found: Timeline(0, TICKS, tuple(found)))


def ticks(timeline: Timeline, *lanes: LaneName) -> set[int]:
    """The seconds in which one of the lanes is busy, one by one."""
    return {
        tick
        for tick in range(TICKS + 4)
        for i in timeline.intervals
        if i.lane in lanes and i.begin_s <= tick < i.end_s
    }


TIMELINE = Timeline(
    10.0,
    20.0,
    (
        Interval("compute", 10.0, 14.0, name="forward"),
        Interval("compute", 14.0, 20.0, name="backward"),
        Interval("nvme_read", 11.0, 13.0, 2000),
        Interval("nvme_read", 12.0, 15.0, 1000),
    ),
)
