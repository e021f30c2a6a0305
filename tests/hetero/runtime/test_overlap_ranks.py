"""Updates of several ranks that go on after step(): a rank gives others what it has updated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.ranks import overlapping
from tests.support.ranks.processes import RankPool


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_need_not_wait_for_their_chunks_in_the_same_order(
    ranks2: RankPool, stage: int, tmp_path: Path
) -> None:
    """Each asks for chunks that the other's program has not waited for."""
    found = [
        ranks2.run(
            overlapping.opposite_orders,
            {
                "zero_stage": stage,
                "overlap_updates": overlap,
                "placement_policy": "nvme",
                "nvme_path": str(tmp_path),
            },
        )
        for overlap in ("none", "forward")
    ]
    for one, other in zip(*found, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_failed_update_is_told_to_the_ranks_that_need_its_values(
    ranks2: RankPool, stage: int
) -> None:
    for told in ranks2.run(overlapping.failed_update, {"zero_stage": stage}):
        assert "was made to fail" in told
