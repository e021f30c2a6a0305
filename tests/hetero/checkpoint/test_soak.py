"""A long training in which anything happens, and that is killed: nothing is lost, nothing leaks."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tests.support.checkpoint.soak import soak
from tests.support.ranks.processes import run_forked

MIB = 1 << 20


@pytest.mark.extra
def test_soak(tmp_path: Path) -> None:
    """The longest lives have, after 2,000 steps, the descriptors of the 200th, and its memory."""
    found = run_forked(soak, tmp_path, 1800, 0, timeout_s=4800)
    assert found["same"]
    assert found["steps"] >= 20
    assert set(found["happened"]) <= {
        *("lives", "kills", "commit", "save", "save beside", "load", "evaluate", "move")
    }
    for (_, descriptors), (_, descriptors_in_the_end) in found["growth"]:
        assert descriptors_in_the_end <= descriptors + 8  # (of a save that is under way)
    assert len(found["growth"]) > 10
    grown = [last[0] - first[0] for first, last in found["growth"]]
    assert statistics.median(grown) < 8 * MIB, found["growth"]
