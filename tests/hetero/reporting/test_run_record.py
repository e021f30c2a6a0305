"""hetero/reporting/run_record: sums over steps, and what bytes are for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.reporting.run_record import MemoryKind, PointList
from offload.memory.tiers import Account, Tier
from tests.support.run_records import MIB, make_record, point, sample


@given(st.integers(0, 200))
def test_a_long_run_keeps_few_points_and_loses_no_step(steps: int) -> None:
    found = PointList(most=8)
    for number in range(1, steps + 1):
        found.add(point(number, loss=float(number), seconds=1.0))
    points = found.points
    assert len(points) <= 8
    assert sum(p.steps for p in points) == steps
    assert sum(p.seconds for p in points) == steps
    assert sum(p.tokens or 0 for p in points) == 100 * steps
    assert sum(p.traffic_bytes["disk_read"] for p in points) == 7 * MIB * steps
    total = sum((p.loss or 0) * p.steps for p in points)
    assert total == pytest.approx(steps * (steps + 1) / 2)
    assert [p.last for p in points] == sorted(p.last for p in points)
    assert not points or points[-1].last == steps


def test_the_step_that_held_most_is_kept_of_several() -> None:
    small, large = point(1), point(2, samples=(sample(4.0, 90 * MIB),))
    assert small.plus(large).samples == large.samples == large.plus(small).samples


def test_losses_and_tokens_that_were_not_told() -> None:
    told, not_told = point(1, loss=3.0), point(2, loss=None, tokens=None)
    both = told.plus(not_told)
    assert (both.loss, both.tokens, both.steps) == (3.0, None, 2)
    assert not_told.plus(not_told).loss is None


def test_the_file_on_nvme_is_told_apart_by_what_is_at_home_there() -> None:
    on_disk = {MemoryKind.GRAD: 50 * MIB, MemoryKind.OPTIM_STATE: 200 * MIB}
    found = sample(0.0).by_kind(Tier.DISK, on_disk)
    assert found == {**on_disk, MemoryKind.SPARE: 50 * MIB}
    # A file that is not written yet is smaller than what will be in it.
    small = replace(sample(0.0), managed_bytes={Tier.DISK: {Account.FILE: 60 * MIB}})
    found = small.by_kind(Tier.DISK, on_disk)
    assert found == {MemoryKind.GRAD: 50 * MIB, MemoryKind.OPTIM_STATE: 10 * MIB}


def test_kinds_are_all_of_a_tier() -> None:
    for tier in Tier:
        assert sum(sample(0.0).by_kind(tier, {}).values()) == sample(0.0).total(tier)


def test_the_first_step_is_not_steady_and_neither_is_one_after_a_move() -> None:
    record = make_record(steps=5)
    assert [p.last for p in record.steady] == [2, 3, 4, 5]
    assert record.tokens_per_s == 50
    moved = make_record(steps=5, changes=((3, "a budget changed"),))
    assert [p.last for p in moved.steady] == [5]
    assert [p.last for p in make_record(steps=1).steady] == [1]
