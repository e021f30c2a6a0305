"""kill -9 at any moment: the training goes on from what it kept last, with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoint.crashing import PLACES, crash, growth
from tests.support.ranks.processes import run_forked


@pytest.mark.parametrize(
    ("kills", "steps"), [(2, 9), pytest.param(200, 70, marks=pytest.mark.extra)]
)
@pytest.mark.parametrize("place", PLACES)
def test_a_training_that_is_killed_again_and_again(
    place: str, kills: int, steps: int, tmp_path: Path
) -> None:
    """While it starts, loads, trains, saves or commits, removes and moves homes: a whole checkpoint
    or commit is there each time."""
    seed = list(PLACES).index(place)  # so that the moments of the kills differ
    found = run_forked(crash, tmp_path, place, kills, steps, seed, timeout_s=3000)
    assert sum(found["died_in"].values()) == kills
    assert set(found["died_in"]) <= set("bltscm"), "begin, load, train, save, commit, move"
    assert found["same"]
    checkpoints = [] if place.startswith("durable") else [f"step-{steps - 1}", f"step-{steps}"]
    assert found["left"] == checkpoints


@pytest.mark.extra
@pytest.mark.parametrize("place", ["disk", "durable-moving"])
def test_a_long_training_leaks_nothing(place: str, tmp_path: Path) -> None:
    """With a save or a commit beside each step, and homes that move."""
    first, last = run_forked(growth, tmp_path, place, timeout_s=1200)
    assert last[1] <= first[1], (first, last)
    assert last[0] - first[0] < 8 << 20, (first, last)
