"""Updates of several ranks that go on after step(): a rank gives others what it has updated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.ranks import overlapping
from tests.support.ranks.processes import RankPool


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_need_not_wait_for_their_chunks_in_the_same_order(
    ranks2: RankPool, stage: int, tmp_path: Path
) -> None:
    """Each asks for chunks that the other's program has not waited for."""
    found = [
        ranks2.run(
            overlapping.opposite_orders,
            {
                "zero_stage": stage,
                "debug": {"overlap_updates": overlap},
                "placement_policy": "nvme",
                "nvme_path": str(tmp_path),
            },
        )
        for overlap in ("none", "forward")
    ]
    for one, other in zip(*found, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.covering(1)
@pytest.mark.parametrize("overlap", ["auto", "both", "backward"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_updates_during_backward(
    ranks2: RankPool, stage: int, overlap: str, tmp_path: Path
) -> None:
    """A shard is updated when its mean is there; clipped, it is updated once more."""
    clips = [9.0, 9.0, 9.0, -9.0, 1e-3, 9.0, 1e-3, 9.0]
    options = {
        "zero_stage": stage,
        "placement_policy": "nvme",
        "nvme_path": str(tmp_path),
        # So few that buffers do not keep all optimizer states.
        "host_memory": {1: "2MiB", 2: "1400KiB", 3: "1MiB"}[stage],
    }
    wanted, found = (
        ranks2.run(
            overlapping.clipped_steps, options | {"debug": {"overlap_updates": setting}}, clips
        )
        for setting in ("none", overlap)
    )
    for (early, masters), (_, right) in zip(found, wanted, strict=True):
        assert all(map(torch.equal, masters, right))
        assert early[0] == 0
        # (In stage 1 means are made when backward is over.)
        assert all(count > 0 for count in early[2:5]) == (stage > 1)


def test_a_rank_that_is_a_step_behind_gives_no_old_values(ranks2: RankPool) -> None:
    for seen, masters in ranks2.run(overlapping.asked_before_the_update, {"zero_stage": 3}):
        assert all(map(torch.equal, seen, masters))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_failed_update_is_told_to_the_ranks_that_need_its_values(
    ranks2: RankPool, stage: int
) -> None:
    for told in ranks2.run(overlapping.failed_update, {"zero_stage": stage}):
        assert "was made to fail" in told
