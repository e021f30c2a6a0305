"""Ranks that are about to make different updates are told, and nothing is changed."""

from __future__ import annotations

import pytest

from tests.support.ranks import step_differences
from tests.support.ranks.processes import RankPool


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("lr", "lr of param group 1 is 0.1 on rank 0 and 0.05 on rank 1 at optimizer.step()"),
        ("betas", "betas of param group 0 is 0.9 on rank 0 and 0.8 on rank 1"),
        ("bias_correction", "bias_correction of param group 0 is 1.0 on rank 0 and 0.0 on rank 1"),
        ("text", "eps of param group 0 is 1e-08 on rank 0 and nan on rank 1"),
        ("clip", "gradient of inner.weight is multiplied by 1.0 on rank 0 and by 0.5 on rank 1"),
        ("group", "inner.weight is in param group 0 on rank 0 and in 1 on rank 1"),
        ("plateau", "lr of param group 0 is 0.01 on rank 0 and 0.001 on rank 1"),
    ],
)
def test_ranks_with_different_updates_are_told(
    ranks2: RankPool, stage: int, what: str, message: str
) -> None:
    for found in ranks2.run(step_differences.differing, {"zero_stage": stage}, what):
        assert message in found["error"]
        assert found["unchanged"]
        assert found["goes_on"]


def test_what_updates_do_not_use_may_differ(ranks2: RankPool) -> None:
    for found in ranks2.run(step_differences.differing, {}, "notes"):
        assert found["error"] == "nothing"
        assert found["goes_on"]
