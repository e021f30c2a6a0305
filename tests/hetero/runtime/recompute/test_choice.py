"""What is computed again: a pure function of bytes and seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.runtime.recompute.policy import CallCost, StepRates, choose, of_count

MB = 1_000_000
CALLS = [CallCost(100 * MB, 10 * MB, 0.1)] * 8
RATES = StepRates(forward_s=1.0, backward_s=2.0, bytes_per_s=1000.0 * MB, other_bytes=0.0)

costs = st.builds(
    CallCost,
    saved_bytes=st.integers(0, 1000),
    input_bytes=st.integers(0, 1000),
    forward_s=st.floats(0, 10),
    is_repeatable=st.booleans(),
)
several = st.lists(costs, max_size=12)
rooms = st.integers(-500, 8000)
aways = st.none() | st.integers(0, 5000)
all_rates = st.builds(
    StepRates,
    forward_s=st.floats(0, 10),
    backward_s=st.floats(0, 10),
    bytes_per_s=st.floats(1, 1000),
    other_bytes=st.floats(0, 5000),
)


def able(calls: list[CallCost]) -> int:
    return sum(call.is_repeatable for call in calls)


@given(several, rooms, aways, all_rates)
@settings(deadline=None)
def test_never_worse_than_none_or_all(
    calls: list[CallCost], room: int, away: int | None, rates: StepRates
) -> None:
    chosen = choose(calls, room, away, rates)
    for count in (0, able(calls)):
        other = of_count(calls, count, room, away, rates)
        if other.is_possible:
            assert chosen.is_possible
            assert chosen.micro_batch_s <= other.micro_batch_s
        elif not chosen.is_possible:
            assert chosen.leaving_bytes <= other.leaving_bytes


@given(several, rooms, st.integers(0, 2000), aways, all_rates)
@settings(deadline=None)
def test_counts_and_places(
    calls: list[CallCost], room: int, count: int, away: int | None, rates: StepRates
) -> None:
    count = min(count, able(calls))
    chosen = of_count(calls, count, room, away, rates)
    assert chosen.count == count
    assert all(call.is_repeatable for call, again in zip(calls, chosen.recomputed, strict=True)
               if again)  # fmt: skip
    assert chosen.is_possible == (away is None or chosen.leaving_bytes <= away)


alike = st.tuples(st.integers(0, 100), st.integers(0, 100), st.floats(0, 1), st.integers(1, 12))


@given(alike, rooms, st.integers(0, 2000), aways, all_rates)
@settings(deadline=None)
def test_more_room_is_never_slower(
    kind: tuple[int, int, float, int], room: int, more: int, away: int | None, rates: StepRates
) -> None:
    """Of calls that are alike, as those of a transformer's layers."""
    saved, given_bytes, forward_s, count = kind
    calls = [CallCost(saved + given_bytes, given_bytes, forward_s)] * count
    less_room, more_room = (choose(calls, r, away, rates) for r in (room, room + more))
    assert more_room.is_possible or not less_room.is_possible
    if less_room.is_possible:
        assert more_room.micro_batch_s <= less_room.micro_batch_s
        assert more_room.leaving_bytes <= less_room.leaving_bytes or (
            more_room.count < less_room.count
        )


@given(several, rooms, aways)
def test_without_rates(calls: list[CallCost], room: int, away: int | None) -> None:
    """All or none."""
    chosen = choose(calls, room, away, None)
    saved = sum(call.saved_bytes for call in calls)
    assert chosen.count == (0 if saved <= max(0, room) or not saved else able(calls)) or room < 0
    assert chosen.micro_batch_s is None


def test_transfers_that_compute_hides_are_free() -> None:
    assert choose(CALLS, 0, None, RATES).count == 0
    slow = replace(RATES, bytes_per_s=100.0 * MB)
    assert choose(CALLS, 0, None, slow).count == 8
    assert choose(CALLS, 800 * MB, None, slow).count == 0


def test_what_lies_between() -> None:
    """As many as bring the transfers down to what compute takes."""
    rates = replace(RATES, bytes_per_s=400.0 * MB)
    chosen = choose(CALLS, 0, None, rates)
    assert 0 < chosen.count < 8
    times = [of_count(CALLS, count, 0, None, rates).micro_batch_s for count in range(9)]
    assert chosen.micro_batch_s == min(times)
    busy = choose(CALLS, 0, None, replace(rates, other_bytes=800.0 * MB))
    assert busy.count > chosen.count


def test_the_last_ones_are_kept() -> None:
    chosen = of_count(CALLS, 2, 320 * MB, None, RATES)
    assert chosen.recomputed == (False, True, False, True, False, False, False, False)
    assert chosen.leaving_bytes == 620 * MB - 320 * MB


def test_only_where_there_is_a_place() -> None:
    nowhere = choose(CALLS, 100 * MB, 0, RATES)
    assert nowhere.is_possible
    assert nowhere.count == 8
    assert not choose(CALLS, 50 * MB, 0, RATES).is_possible
    half = choose(CALLS, 500 * MB, 0, RATES)
    assert half.is_possible
    assert half.count == 4


def test_those_that_cannot_be_repeated_are_left() -> None:
    calls = [replace(call, is_repeatable=index % 2 == 0) for index, call in enumerate(CALLS)]
    assert choose(calls, 0, 0, None).recomputed == (True, False) * 4


def test_very_many_calls() -> None:
    calls = [CallCost(100, 10, 1e-3)] * 1000
    slow = StepRates(1.0, 2.0, 1e3, 0.0)
    assert choose(calls, 0, None, slow).count == 1000
    assert choose(calls, 1 << 20, None, slow).count == 0


@pytest.mark.parametrize("share", [0.5, 1.0, 3.0])
def test_times(share: float) -> None:
    cost = CallCost(1000, 100, 2.0, 50, False).times(share)
    assert cost == CallCost(int(1000 * share), int(100 * share), 2 * share, int(50 * share), False)
    assert RATES.times(share).other_bytes == RATES.other_bytes
