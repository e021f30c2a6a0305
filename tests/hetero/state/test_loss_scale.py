"""hetero/state/grads: dynamic loss scaling."""

from hypothesis import example, given
from hypothesis import strategies as st

from hetero.state.grads import LossScale


def test_without_a_window_it_stays_as_it_is():
    scale = LossScale()
    for overflow in (True, False) * 5:
        scale.update(overflow)
    assert scale == LossScale(value=1.0, window=0, good_steps=0, skipped_steps=0)
    assert not scale.dynamic


@example(2.0, 100, [True] * 5)
@example(8.0, 2, [False, True, False, False])
@given(st.floats(1, 2.0**40), st.integers(1, 5), st.lists(st.booleans(), max_size=60))
def test_an_overflow_halves_it_and_a_window_of_good_steps_doubles_it(value, window, overflows):
    scale = LossScale(value, window)
    assert scale.dynamic
    good = skipped = 0
    for overflow in overflows:
        scale.update(overflow)
        if overflow:
            skipped, good, value = skipped + 1, 0, max(value / 2, 1.0)
        else:
            good += 1
            value = value * 2 if good % window == 0 else value
        assert (scale.value, scale.skipped_steps) == (value, skipped)
