"""hetero/reporting/run_record: sums over steps, and what bytes are for."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hetero.reporting.run_record import MemoryKind, PointList, thinned
from offload.memory.tiers import Account, Tier
from tests.support.run_records import MIB, make_record, point, sample


@given(st.integers(0, 200), st.integers(1, 200))
def test_a_long_run_keeps_few_points_and_the_one_that_held_most(steps: int, largest: int) -> None:
    found = PointList(most=8)
    for number in range(1, steps + 1):
        more = {"samples": (sample(4.0, 90 * MIB),)} if number == largest else {}
        found.add(point(number, **more))
    numbers = [p.last for p in found.points]
    assert len(numbers) <= 9
    assert numbers == sorted(set(numbers))
    assert not steps or (numbers[0] == 1 and numbers[-1] == steps)
    assert largest > steps // 2 or largest in numbers


def test_few_points_are_all_kept() -> None:
    points = [point(number) for number in range(1, 6)]
    assert thinned(points, 5) == points
    assert [p.last for p in thinned(points, 4)][::3] == [1, 5]


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
