"""kill -9 at any moment: the training goes on from what it kept last, with the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoint.crashing import PLACES

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("kills", "steps"), [(2, 9), pytest.param(200, 70, marks=pytest.mark.extra)]
)
@pytest.mark.parametrize("place", PLACES)
def test_a_training_that_is_killed_again_and_again(
    place: str, kills: int, steps: int, tmp_path: Path
) -> None:
    """While it starts, loads, trains, saves or commits, removes and moves homes: a whole checkpoint
    or commit is there each time."""
    command = [sys.executable, "-m", "tests.support.checkpoint.crashing"]
    seed = list(PLACES).index(place)  # so that the moments of the kills differ
    arguments = [str(tmp_path), place, str(kills), str(steps), str(seed)]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=3000
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert sum(found["died_in"].values()) == kills
    assert set(found["died_in"]) <= set("bltscm"), "begin, load, train, save, commit, move"
    assert found["same"]
    checkpoints = [] if place.startswith("durable") else [f"step-{steps - 1}", f"step-{steps}"]
    assert found["left"] == checkpoints
