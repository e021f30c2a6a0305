"""What several ranks do beside training, alone or together, changes no bit of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks.processes import RankPool
from tests.zoo.rank_loops import DISTURBANCES, disturbed
from tests.zoo.runs import Run

SETTINGS: dict[str, dict[str, Any]] = {
    "stage-1": {"placement_policy": "cpu", "zero_stage": 1},
    "stage-3-nvme": {"placement_policy": "nvme", "zero_stage": 3},
}
_UNDISTURBED: dict[str, list[Run]] = {}


@pytest.mark.parametrize(
    ("how", "where"),
    [
        # (What is compiled on ranks is also tests/whole/test_inductor.py's.)
        pytest.param(how, where, marks=pytest.mark.extra if how == "compiled" else ())
        for how in DISTURBANCES
        for where in SETTINGS
        if how != "nothing"
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
    for found, expected in zip(
        ranks2.run(disturbed, how, settings), _UNDISTURBED[where], strict=True
    ):
        if how == "compiled":  # what is traced may be computed in another order
            assert found.losses == pytest.approx(expected.losses, rel=1e-5)
            for key, master in found.masters.items():
                torch.testing.assert_close(master, expected.masters[key], rtol=1e-5, atol=1e-5)
            continue
        assert found.losses == expected.losses
        assert found.norms == expected.norms
        for key, master in found.masters.items():
            assert torch.equal(master, expected.masters[key]), key
