"""hetero/state/grads: dynamic loss scaling."""

from hypothesis import given
from hypothesis import strategies as st

from hetero.state.grads import LossScale


def test_without_a_window_it_stays_as_it_is():
    scale = LossScale()
    for overflow in (True, False) * 5:
        scale.update(overflow)
    assert scale == LossScale(value=1.0, window=0, good_steps=0, skipped_steps=0)
    assert not scale.dynamic


def test_overflow_halves_and_counts_the_skipped_step():
    scale = LossScale(65536.0, 10)
    assert scale.dynamic
    scale.update(True)
    scale.update(True)
    assert (scale.value, scale.skipped_steps) == (16384.0, 2)


def test_it_doubles_after_the_window_of_good_steps():
    scale = LossScale(4.0, 3)
    seen = []
    for _ in range(7):
        scale.update(False)
        seen.append(scale.value)
    assert seen == [4.0, 4.0, 8.0, 8.0, 8.0, 16.0, 16.0]


def test_an_overflow_starts_the_window_anew():
    scale = LossScale(8.0, 2)
    for overflow in (False, True, False):
        scale.update(overflow)
    assert scale.value == 4.0
    scale.update(False)
    assert scale.value == 8.0


def test_it_does_not_fall_below_one():
    scale = LossScale(2.0, 100)
    for _ in range(5):
        scale.update(True)
    assert scale.value == 1.0
    assert scale.skipped_steps == 5


@given(
    st.floats(1, 2.0**40),
    st.integers(1, 5),
    st.lists(st.booleans(), max_size=60),
)
def test_each_step_moves_it_the_right_way(value, window, overflows):
    scale = LossScale(value, window)
    good = skipped = 0
    for overflow in overflows:
        before = scale.value
        scale.update(overflow)
        if overflow:
            skipped, good = skipped + 1, 0
            assert scale.value <= before
            assert scale.value in (before, max(before / 2, 1.0))
        else:
            good += 1
            assert scale.value == (before * 2 if good % window == 0 else before)
        assert scale.skipped_steps == skipped
