"""Timelines: what is recorded, sums over intervals, traces."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.memory.tiers import Account, Tier
from offload.timeline import (
    LANES,
    Interval,
    Sample,
    Timeline,
    note,
    record,
    sample,
    span,
)
from tests.support.timelines import TICKS, TIMELINE, ticks, timelines
from tests.support.training.loops import batches, build


@given(timelines)
def test_busy_seconds_are_counted_once(timeline: Timeline) -> None:
    for lanes in (["update"], ["nvme_read", "h2d"], []):
        assert timeline.busy_s(*lanes) == len(ticks(timeline, *lanes))  # type: ignore[arg-type]


@given(timelines)
def test_rows_have_no_overlap_and_are_as_few_as_can_be(timeline: Timeline) -> None:
    for lane in timeline.lanes:
        rows = timeline.rows(lane)
        assert sorted((i for row in rows for i in row), key=hash) == sorted(
            timeline.of(lane), key=hash
        )
        for row in rows:
            assert all(a.end_s <= b.begin_s for a, b in pairwise(row))
        deepest = max(
            sum(i.begin_s <= tick < i.end_s for i in timeline.of(lane)) for tick in range(TICKS + 4)
        )
        assert len(rows) == deepest


@given(timelines, st.integers(0, TICKS), st.integers(0, TICKS))
def test_a_part_has_what_lies_in_it(timeline: Timeline, begin: int, length: int) -> None:
    part = timeline.between(begin, begin + length)
    inside = set(range(begin, begin + length))
    for lane in LANES:
        assert part.busy_s(lane) == len(ticks(timeline, lane) & inside)
    whole = timeline.between(0, TICKS + 4)
    assert whole.intervals == timeline.intervals


def test_bytes_of_what_is_cut_are_in_proportion() -> None:
    timeline = Timeline(0, 10, (Interval("h2d", 2, 6, 400),))
    assert timeline.between(3, 9).nbytes("h2d") == 300
    assert timeline.nbytes("h2d") == 400


def test_python_notes_beside_the_native_core() -> None:
    with record() as found:
        begin_s = time.perf_counter()
        with span("gather", 5, "a chunk"):
            pass
        note("compute", begin_s, name="forward")
        with pytest.raises(RuntimeError, match="still being recorded"):
            _ = found.timeline
    timeline = found.timeline
    assert timeline.lanes == ["compute", "gather"]
    (gather,) = timeline.of("gather", "a chunk")
    assert gather.nbytes == 5
    assert timeline.begin_s <= begin_s <= gather.begin_s <= gather.end_s <= timeline.end_s
    assert timeline.of("compute", "backward") == []


def test_nothing_is_noted_otherwise() -> None:
    note("gather", 0.0, 1.0)
    with record() as found:
        pass
    note("gather", 0.0, 1.0)
    assert found.timeline.intervals == ()


def test_what_began_before_counts_from_the_beginning_on() -> None:
    with record() as found:
        note("gather", 0.0)
    (gather,) = found.timeline.intervals
    assert gather.begin_s == found.timeline.begin_s


def test_an_exception_ends_the_recording() -> None:
    with pytest.raises(KeyError), record():
        raise KeyError
    with record(), pytest.raises(RuntimeError, match="recorded already"), record():
        pass
    with record():
        pass


def test_training_shows_all_its_bytes(tmp_path: Path) -> None:
    """Of a step on three tiers: each byte of disk and link, each tile's update, in time."""
    model, optimizer = build(
        placement_policy="auto", backend="emulated", device_memory="300KiB", chunk_numel=4096,
        host_memory="900KiB", nvme_path=str(tmp_path), debug={"overlap_updates": "none"},
    )  # fmt: skip
    engine = optimizer.engine
    tokens = batches(1)[0]
    cache = engine.chunk_groups[0].params.copies.cache
    for _ in range(2):
        engine.synchronize()
        cache.finish_transfers()
        before, tasks = engine.traffic, engine.chunk_groups[0].pipeline.stats["tasks"]
        with record() as found:
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.synchronize()
            cache.finish_transfers()
            after = engine.traffic
        timeline = found.timeline
        assert timeline.dropped == 0
        assert timeline.nbytes("nvme_read") == after.disk_read - before.disk_read > 0
        assert timeline.nbytes("nvme_write") == after.disk_write - before.disk_write > 0
        assert timeline.nbytes("h2d") == after.h2d - before.h2d > 0
        assert timeline.nbytes("d2h") == after.d2h - before.d2h > 0
        assert len(timeline.of("update")) >= engine.chunk_groups[0].pipeline.stats["tasks"] - tasks
        assert timeline.of("gather")
    engine.close()


def test_trace_has_a_track_for_each_row(tmp_path: Path) -> None:
    TIMELINE.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == ["NVMe read 1", "NVMe read 2", "training loop"]
    whole = [e for e in events if e["ph"] == "X"]
    assert {names[e["tid"]] for e in whole} == set(names.values())
    first = next(e for e in whole if e["name"] == "forward")
    assert (first["ts"], first["dur"]) == (0.0, 4e6)
    assert sum(e["args"].get("bytes", 0) for e in whole) == 3000


def counters(timeline: Timeline) -> dict[str, list[tuple[float, dict[str, int]]]]:
    """The counter events of a trace: when, in microseconds, and their values."""
    found: dict[str, list[tuple[float, dict[str, int]]]] = {}
    for event in json.loads(json.dumps(timeline.as_trace()))["traceEvents"]:
        if event["ph"] == "C":
            assert event["pid"] == 1
            assert all(isinstance(value, int) for value in event["args"].values())
            found.setdefault(event["name"], []).append((event["ts"], event["args"]))
    for events in found.values():
        assert [at for at, _ in events] == sorted(at for at, _ in events)
    return found


def test_a_trace_counts_what_was_sampled_and_what_was_moved() -> None:
    samples = (Sample("RAM", 12.0, {"param": 7}), Sample("RAM", 10.0, {"param": 5, "grad": 1}))
    found = counters(replace(TIMELINE, samples=samples))
    assert found["RAM"] == [(0.0, {"param": 5, "grad": 1}), (2e6, {"param": 7})]
    moved = found["NVMe read, bytes so far"]
    assert moved == [(3e6, {"bytes": 2000}), (5e6, {"bytes": 3000})]


def test_a_part_begins_with_what_held_before_it() -> None:
    samples = tuple(
        Sample("RAM", at, {"param": value}) for at, value in ((10, 1), (12, 2), (16, 3))
    )
    part = replace(TIMELINE, samples=samples).between(13.0, 15.0)
    assert part.samples == (Sample("RAM", 13.0, {"param": 2}),)
    assert counters(part)["RAM"] == [(0.0, {"param": 2})]


def test_a_recording_keeps_samples_of_its_time_alone() -> None:
    sample("RAM", {"param": 1})
    with record() as found:
        sample("RAM", {"param": 2})
    sample("RAM", {"param": 3})
    assert [s.values for s in found.timeline.samples] == [{"param": 2}]


def test_a_step_shows_the_bytes_of_each_tier_by_account(tmp_path: Path) -> None:
    model, optimizer = build(
        placement_policy="nvme", chunk_numel=4096, host_memory="2MiB", dtype="fp32",
        activation_memory="512KiB", nvme_path=str(tmp_path),
    )  # fmt: skip
    engine, tokens = optimizer.engine, batches(1)[0]
    with record() as found:
        engine.ledger.sample()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        engine.synchronize()
    seen = counters(found.timeline)
    ram = [values for _, values in seen["RAM, bytes held"]]
    assert max(values.get("activation", 0) for values in ram) > 0
    assert all(sum(values.values()) <= 2 << 20 for values in ram)
    assert ram[0]["param"] == engine.ledger.by_account[Tier.HOST][Account.PARAM]
    assert sum(ram[-1].values()) == engine.ledger.in_use_bytes["host"]
    assert seen["NVMe, bytes held"][-1][1]["file"] > 0
    assert seen["NVMe read, bytes so far"][-1][1]["bytes"] > 0
    engine.close()
