"""offload/disk/scratch_file: how many units of the pattern each directory gets."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload._native import StripeMap
from offload.disk.scratch_file import MAX_PLACES, UNIT_BYTES, choose_weights, fits

GIB = 1 << 30
RATES = st.lists(st.floats(1e6, 1e10), min_size=1, max_size=6)


def weights_of(rates, nbytes=GIB, free=None, filesystems=None):
    free = free or [1 << 50] * len(rates)
    return choose_weights(rates, nbytes, free, filesystems or list(range(len(rates))))


@pytest.mark.parametrize(
    ("rates", "weights"),
    [
        ([5.0], [1]),
        ([5.0, 5.0], [1, 1]),
        ([5.0, 5.1], [1, 1]),  # a difference that is noise makes no long pattern
        ([2.0, 1.0], [2, 1]),
        ([3.0, 2.0], [3, 2]),
        ([1.0, 1.0, 2.0], [1, 1, 2]),
        ([100.0, 1.0], [1, 0]),  # too slow: a sixteenth would make the other wait
    ],
)
def test_shares_are_in_proportion_to_speed(rates, weights):
    assert weights_of(rates) == weights


def slowest(weights, rates):
    """Seconds per place of the pattern."""
    return max(w / r for w, r in zip(weights, rates, strict=True)) / sum(weights)


@given(RATES)
def test_no_short_pattern_is_much_faster(rates):
    weights = weights_of(rates)
    assert 1 <= sum(weights) <= MAX_PLACES
    ideal = 1 / sum(rates)
    cost = slowest(weights, rates)
    assert cost >= ideal * (1 - 1e-9)
    # As fast as the fastest alone, or the best split by rounding down; within the tolerance.
    alone = 1 / max(rates)
    rounded = [math.floor(r / sum(rates) * MAX_PLACES) for r in rates]
    rounded[rates.index(max(rates))] += MAX_PLACES - sum(rounded)
    assert cost <= 1.06 * min(alone, slowest(rounded, rates))


@given(RATES, st.data())
def test_what_is_chosen_fits(rates, data):
    room = st.integers(0, 64 * UNIT_BYTES)
    free = [data.draw(room) for _ in rates]
    filesystems = [data.draw(st.integers(0, len(rates) - 1)) for _ in rates]
    free = [free[fs] for fs in filesystems]  # those on one filesystem see the same
    total = sum(dict(zip(filesystems, free, strict=True)).values())
    nbytes = data.draw(st.integers(1, max(1, total)))
    weights = choose_weights(rates, nbytes, free, filesystems)
    if weights is None:
        return
    used = [m for m, w in enumerate(weights) if w]
    stripes = StripeMap([weights[m] for m in used], UNIT_BYTES)
    needed = dict.fromkeys(filesystems, 0)
    for index, member in enumerate(used):
        needed[filesystems[member]] += stripes.member_bytes(index, nbytes)
    room_of = dict(zip(filesystems, free, strict=True))
    assert all(needed[fs] <= room_of[fs] for fs in needed)
    assert fits(weights, nbytes, room_of, filesystems)


def test_a_full_disk_gets_less_than_it_is_fast_for():
    free = [100 * GIB, 1000 * GIB]
    weights = weights_of([1.0, 1.0], 400 * GIB, free)
    assert weights is not None
    stripes = StripeMap(weights, UNIT_BYTES)
    assert stripes.member_bytes(0, 400 * GIB) <= 100 * GIB
    assert weights[0] > 0


@pytest.mark.parametrize("share", [0.5, 0.9, 0.95])
def test_most_of_the_space_can_be_used(share):
    free = [100 * GIB, 730 * GIB, 290 * GIB]
    assert weights_of([1.0, 1.0, 3.0], int(share * sum(free)), free) is not None


def test_what_cannot_fit_has_no_weights():
    assert weights_of([1.0, 1.0], 10 * GIB, [4 * GIB, 5 * GIB]) is None
    # Two directories on one filesystem have its space once.
    assert weights_of([1.0, 1.0], 8 * GIB, [5 * GIB, 5 * GIB], [7, 7]) is None
    assert weights_of([1.0, 1.0], 8 * GIB, [5 * GIB, 5 * GIB], [7, 8]) == [1, 1]
