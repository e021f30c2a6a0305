"""The learning rate over the steps."""

from __future__ import annotations

import pytest

from hetero.job.optimization import FINAL_FRACTION, lr_factor


def test_warm_up_rises_evenly_to_the_peak() -> None:
    factors = [lr_factor(step, warmup=4, steps=20, schedule="cosine") for step in range(5)]
    assert factors == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_cosine_falls_to_its_floor_in_the_last_step() -> None:
    factors = [lr_factor(step, warmup=2, steps=30, schedule="cosine") for step in range(2, 30)]
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] == pytest.approx(FINAL_FRACTION)


def test_constant_stays() -> None:
    assert {lr_factor(step, 0, 10, "constant") for step in range(10)} == {1.0}


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_short_runs_have_a_rate(steps: int) -> None:
    for warmup in (0, 1, 10):
        for step in range(steps):
            assert 0 < lr_factor(step, warmup, steps, "cosine") <= 1
