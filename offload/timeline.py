"""What each resource did when: recorded on request, as intervals; and what torch's profiler shows.

A *lane* is a resource: "compute" (what the training loop calls forward, backward, optimizer),
"gather" (compute waits for a chunk's parameters), "activation" (compute waits for what backward
needs, or for room for it), "update" (tiles of the optimizer's update on the
CPU), "nvme_read", "nvme_write", "h2d", "d2h" (the link). An *interval* is a time in which a lane
was busy with one thing; intervals of a lane may overlap, as transfers in flight do.

A *track* is something that is counted, as the bytes of a tier by account, and a *sample* says what
its values are from a moment on.

The native core records its own lanes; Python's are recorded by note() and span(), and samples by
sample(). A recording belongs to the process, not to an engine, so it shows all engines. Without a
recording under way nothing is kept.

torch's profiler shows blocks that are *marked*: what of a step is hetero's, and which part of it.

    hetero::gather       a chunk's parameters are brought where compute uses them, or found there
    hetero::reduce       a chunk's gradients start on their way to the mean over the ranks
    hetero::wait_reduce  until the oldest of these means is there, and is kept
    hetero::update       step(), or backward, submits updates, and waits as far as it must
    hetero::wait_update  a use of a chunk waits for the update of it

Transfers and updates themselves run in native threads, which that profiler does not see; a
recording does. The blocks exist while a profiler is active: one alone takes 15 us without a
profiler, the look for one 0.1 us.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from torch.autograd import profiler

from offload import _native

P = ParamSpec("P")
R = TypeVar("R")

LaneName = Literal[
    "compute", "gather", "activation", "update", "nvme_read", "nvme_write", "h2d", "d2h"
]

# In the order of pictures, with the words there.
LANES: dict[LaneName, str] = {
    "compute": "training loop",
    "gather": "waits for a chunk",
    "activation": "waits for an activation",
    "update": "update on CPU",
    "nvme_read": "NVMe read",
    "nvme_write": "NVMe write",
    "h2d": "link to device",
    "d2h": "link to RAM",
}

MOST_INTERVALS = 1 << 17  # of the native core; a step of 1000 chunks has some thousands


@dataclass(frozen=True)
class Interval:
    """`lane` was busy from `begin_s` to `end_s`, of time.perf_counter(), with `nbytes` bytes."""

    lane: LaneName
    begin_s: float
    end_s: float
    nbytes: int = 0
    name: str = ""

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class Sample:
    """The values of `track`, by name, from `at_s` of time.perf_counter() on."""

    track: str
    at_s: float
    values: Mapping[str, int]


@dataclass(frozen=True)
class Timeline:
    """What was recorded from `begin_s` to `end_s`; `dropped` intervals found no room.

    What was under way at the beginning counts from there on; what still was at the end is missing,
    so look at what lies some way before it (between()).
    """

    begin_s: float
    end_s: float
    intervals: tuple[Interval, ...]
    dropped: int = 0
    samples: tuple[Sample, ...] = ()

    @property
    def seconds(self) -> float:
        """How long it was recorded."""
        return self.end_s - self.begin_s

    @property
    def lanes(self) -> list[LaneName]:
        """Those that have intervals, in the order of LANES."""
        found = {i.lane for i in self.intervals}
        return [lane for lane in LANES if lane in found]

    def of(self, lane: LaneName, name: str | None = None) -> list[Interval]:
        """A lane's intervals (of a name), by their beginning."""
        found = (i for i in self.intervals if i.lane == lane and name in (None, i.name))
        return sorted(found, key=lambda i: (i.begin_s, i.end_s))

    def between(self, begin_s: float, end_s: float) -> Timeline:
        """The part in that time; of what reaches beyond it, the bytes in proportion."""
        cut = []
        for i in self.intervals:
            begin, end = max(i.begin_s, begin_s), min(i.end_s, end_s)
            if end > begin:
                share = (end - begin) / i.seconds
                cut.append(replace(i, begin_s=begin, end_s=end, nbytes=round(i.nbytes * share)))
        # What held at the beginning was said before it.
        samples = (replace(s, at_s=max(s.at_s, begin_s)) for s in self._in_order(end_s))
        return replace(
            self,
            begin_s=begin_s,
            end_s=end_s,
            intervals=tuple(cut),
            samples=tuple({(s.track, s.at_s): s for s in samples}.values()),
        )

    def _in_order(self, end_s: float) -> list[Sample]:
        """The samples until `end_s`, by their time."""
        return sorted((s for s in self.samples if s.at_s <= end_s), key=lambda s: s.at_s)

    @property
    def moved(self) -> list[Sample]:
        """The bytes that each lane had moved since the beginning, whenever a transfer ended."""
        found = []
        for lane in self.lanes:
            total, track = 0, f"{LANES[lane]}, bytes so far"
            for i in sorted(self.of(lane), key=lambda i: i.end_s):
                if i.nbytes:
                    total += i.nbytes
                    found.append(Sample(track, i.end_s, {"bytes": total}))
        return found

    def busy_s(self, *lanes: LaneName) -> float:
        """Seconds in which any of the lanes was busy."""
        return sum(
            end - begin for begin, end in union(i for i in self.intervals if i.lane in lanes)
        )

    def nbytes(self, lane: LaneName) -> int:
        """Bytes of all of a lane's intervals."""
        return sum(i.nbytes for i in self.of(lane))

    def rows(self, lane: LaneName) -> list[list[Interval]]:
        """A lane's intervals in as few rows as have no two that overlap."""
        rows: list[list[Interval]] = []
        for interval in self.of(lane):
            free = next((row for row in rows if row[-1].end_s <= interval.begin_s), None)
            if free is None:
                rows.append(free := [])
            free.append(interval)
        return rows

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes a trace that ui.perfetto.dev and chrome://tracing show. Raises OSError."""
        Path(path).write_text(json.dumps(self.as_trace()), encoding="utf-8")

    def as_trace(self) -> dict[str, Any]:
        """The object of a trace file, in the Trace Event Format; times are in microseconds.

        Intervals are complete events ("X"); samples, and the bytes that lanes have moved, counters
        ("C").
        """
        events: list[dict[str, Any]] = []
        for lane in self.lanes:
            rows = self.rows(lane)
            for row, intervals in enumerate(rows):
                tid = len(events) + 1
                track = {"pid": 1, "tid": tid}
                words = LANES[lane] + (f" {row + 1}" if len(rows) > 1 else "")
                for name, value in (("name", words), ("sort_index", tid)):
                    what = {"name": f"thread_{name}", "args": {name: value}}
                    events.append({"ph": "M", **what, **track})
                for i in intervals:
                    span_us = {"ts": (i.begin_s - self.begin_s) * 1e6, "dur": i.seconds * 1e6}
                    nbytes = {"bytes": i.nbytes} if i.nbytes else {}
                    what = {"name": i.name or LANES[lane], "args": nbytes}
                    events.append({"ph": "X", **what, **span_us, **track})
        for sample in [*self._in_order(self.end_s), *self.moved]:
            at = {"ts": (sample.at_s - self.begin_s) * 1e6, "pid": 1}
            events.append({"ph": "C", "name": sample.track, "args": dict(sample.values), **at})
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def union(intervals: Iterable[Interval]) -> list[tuple[float, float]]:
    """From when until when any of them was, in order; joined where they overlap or touch."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted((i.begin_s, i.end_s) for i in intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


class Recording:
    """A recording under way, or the timeline that came of it."""

    def __init__(self) -> None:
        self._intervals: list[Interval] = []
        self._samples: list[Sample] = []
        self._timeline: Timeline | None = None

    @property
    def timeline(self) -> Timeline:
        """What was recorded. Raises RuntimeError before the end of the block."""
        if self._timeline is None:
            raise RuntimeError("the timeline is still being recorded; ask after the block")
        return self._timeline


_current: Recording | None = None


@contextmanager
def record() -> Iterator[Recording]:
    """Records what the process does inside the block, one recording at a time.

    Room for MOST_INTERVALS of the native core, of 32 bytes each, is taken at the beginning.
    Raises RuntimeError if another recording is under way.
    """
    global _current
    _native.start_timeline(MOST_INTERVALS)
    recording = _current = Recording()
    try:
        yield recording
    finally:
        _current = None
        begin_ns, end_ns, native, dropped = _native.stop_timeline()
        begin_s, end_s = begin_ns / 1e9, end_ns / 1e9
        found = [Interval(lane, b / 1e9, e / 1e9, nbytes) for lane, b, e, nbytes in native]
        # (Others' threads may be noting what they have just ended.)
        found += [replace(i, begin_s=max(i.begin_s, begin_s)) for i in list(recording._intervals)]
        samples = [replace(s, at_s=max(s.at_s, begin_s)) for s in list(recording._samples)]
        recording._timeline = Timeline(begin_s, end_s, tuple(found), dropped, tuple(samples))


def note(
    lane: LaneName, begin_s: float, end_s: float | None = None, nbytes: int = 0, name: str = ""
) -> None:
    """`lane` was busy from `begin_s` until `end_s` (now), of time.perf_counter(); from any thread.

    Nothing if no recording is under way.
    """
    current = _current
    if current is not None:
        end_s = time.perf_counter() if end_s is None else end_s
        current._intervals.append(Interval(lane, begin_s, end_s, nbytes, name))


def is_recording() -> bool:
    """Whether a recording is under way, so that what costs time to find out is worth it."""
    return _current is not None


def sample(track: str, values: Mapping[str, int]) -> None:
    """The values of `track` are these from now on; from any thread.

    Nothing if no recording is under way.
    """
    current = _current
    if current is not None:
        current._samples.append(Sample(track, time.perf_counter(), values))


@contextmanager
def span(lane: LaneName, nbytes: int = 0, name: str = "") -> Iterator[None]:
    """note() for the time of a block."""
    begin_s = time.perf_counter()
    try:
        yield
    finally:
        note(lane, begin_s, None, nbytes, name)


_NOTHING = nullcontext()


def mark(name: str) -> AbstractContextManager[object]:
    """A block that torch's profiler shows; without an active profiler it costs 0.1 us."""
    # (record_function alone takes some microseconds with no profiler, too.)
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NOTHING


def marked(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """mark() around each call of a function."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not profiler._is_profiler_enabled:
                return function(*args, **kwargs)
            with profiler.record_function(name):
                return function(*args, **kwargs)

        return call

    return decorate
