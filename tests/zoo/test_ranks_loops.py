"""What several ranks do beside training, alone or together, changes no bit of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks.processes import RankPool
from tests.zoo.rank_loops import DISTURBANCES, disturbed
from tests.zoo.runs import Run, assert_same_bits

SETTINGS: dict[str, dict[str, Any]] = {
    "stage-1": {"placement_policy": "cpu", "zero_stage": 1},
    "stage-3-nvme": {"placement_policy": "nvme", "zero_stage": 3},
}
_UNDISTURBED: dict[str, list[Run]] = {}


@pytest.mark.parametrize(
    ("how", "where"),
    [
        # (In stage 1 each rank has all values, and needs nobody for what it does alone.)
        pytest.param(
            how, where, marks=[pytest.mark.extra] * (where == "stage-1" and "_in_" not in how)
        )
        for how in DISTURBANCES
        if how != "nothing"
        for where in SETTINGS
    ],
)
def test_training_goes_on_as_without(
    ranks2: RankPool, tmp_path: Path, how: str, where: str
) -> None:
    settings = SETTINGS[where] | {"rank_timeout_s": 60.0}
    if settings["placement_policy"] == "nvme":
        settings["nvme_path"] = str(tmp_path)
    if where not in _UNDISTURBED:
        _UNDISTURBED[where] = ranks2.run(disturbed, "nothing", settings)
    runs = ranks2.run(disturbed, how, settings)
    for found, expected in zip(runs, _UNDISTURBED[where], strict=True):
        assert_same_bits(found, expected)
