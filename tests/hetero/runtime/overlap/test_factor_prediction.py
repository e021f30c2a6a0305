"""Guesses of the factor that clipping and unscaling give gradients."""

from __future__ import annotations

import pytest

from hetero.runtime.update_schedule import FactorPrediction


def guess(always: bool, *factors: float | None) -> float | None:
    prediction = FactorPrediction(always)
    for factor in factors:
        prediction.note(factor)
    return prediction.guess()


@pytest.mark.parametrize("always", [False, True])
def test_what_recent_steps_had_is_guessed(always: bool) -> None:
    assert guess(always, 1.0) == 1.0
    assert guess(always, 0.25, 0.25) == 0.25
    assert guess(always, *[0.5] * 9, *[0.25] * 5) == 0.25
    assert guess(always, 1.0, 0.3, 1.0, 0.7, 1.0) == 1.0


def test_a_guess_that_is_mostly_wrong_is_not_made() -> None:
    assert guess(False) is None
    assert guess(False, 0.5) is None, "the factor of a clipped step does not come again"
    assert guess(False, 0.5, 0.6, 0.7, 1.0) is None
    assert guess(False, None, None, 1.0) is None
    assert guess(False, 1.0, 0.5, 1.0, 0.6) == 1.0


def test_a_guess_that_is_always_made() -> None:
    assert guess(True) == 1.0
    assert guess(True, 0.5, 0.6, None) == 1.0
