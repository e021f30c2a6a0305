"""kill -9 at any moment: the training goes on from its last checkpoint, with the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("kills", [12, pytest.param(200, marks=pytest.mark.extra)])
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_a_training_that_is_killed_again_and_again(place: str, kills: int, tmp_path: Path) -> None:
    """While it starts, loads, trains, saves and removes; a whole checkpoint is there each time."""
    command = [sys.executable, "-m", "tests.support.checkpoint.crashing"]
    arguments = [str(tmp_path), place, str(kills), str(20 + kills // 4), "0"]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=3000
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert sum(found["died_in"].values()) == kills
    assert set(found["died_in"]) <= set("blts"), "begin, load, train, save"
    assert found["same"]
    last = 20 + kills // 4
    assert found["left"] == [f"step-{last - 1}", f"step-{last}"]
